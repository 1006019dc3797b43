"""Writes mc40.jsonl beside this file: forty four-choice questions behind one few-shot beginning of about 600 tokens.

Questions, wrong answers and examples were written for this project; they ask for general knowledge. A line is what
`vllm score` reads: {"id", "context", "choices", "answer"}; the contexts are equal up to the question.

python -m benchmarks.data.make_mc40
"""

import json
import pathlib
import random

HEAD = (
    "Below are short questions about the world, each with its correct answer. An answer is brief: a word, a name or a "
    "few words, with nothing before or after it.\n\n"
)
EXAMPLES = [
    ("What is the name of the star at the centre of our solar system?", "The Sun"),
    ("How many legs does an insect have?", "Six"),
    ("Which gas do people need from the air in order to live?", "Oxygen"),
    ("On which continent does the river Amazon flow?", "South America"),
    ("What do we call a baby cat?", "A kitten"),
    ("Which instrument has black keys and white keys?", "The piano"),
    ("What is frozen water called?", "Ice"),
    ("How many days are there in a week?", "Seven"),
    ("Which animal gives us wool?", "The sheep"),
    ("What colour do you get when you mix blue paint and yellow paint?", "Green"),
    ("In which direction does the Sun rise?", "In the east"),
    ("Which organ pumps blood through the body?", "The heart"),
    ("What is the largest animal that has ever lived?", "The blue whale"),
    ("Which language is spoken by most people in Brazil?", "Portuguese"),
    ("What tool is used to look at the stars?", "A telescope"),
    ("How many sides does a triangle have?", "Three"),
    ("What is made from grapes that are left to dry?", "Raisins"),
    ("Which season comes after winter?", "Spring"),
    ("What is the metal that magnets attract most readily?", "Iron"),
    ("Which planet do we live on?", "The Earth"),
    ("What do bees make from the nectar of flowers?", "Honey"),
    ("Which shape has no corners at all?", "A circle"),
    ("What do we call the person who flies an aeroplane?", "A pilot"),
    ("Which sense do we use to hear music?", "Hearing"),
    ("What covers the body of a bird?", "Feathers"),
    ("Which meal do most people eat in the morning?", "Breakfast"),
    ("What is the name of the force that slows a sliding box?", "Friction"),
    ("Which country has Ottawa as its capital?", "Canada"),
    ("What do we call a scientist who studies rocks?", "A geologist"),
    ("How many wheels does a bicycle have?", "Two"),
    ("Which drink is made from roasted and ground beans?", "Coffee"),
    ("What is the young of a frog called while it lives in water?", "A tadpole"),
]

# question, right answer, three wrong ones
QUESTIONS = [
    ("What is the capital of France?", "Paris", "Madrid", "Vienna", "Brussels"),
    ("Which planet is known for its bright rings?", "Saturn", "Mars", "Venus", "Mercury"),
    ("How many minutes are there in an hour?", "Sixty", "Fifty", "Ninety", "One hundred"),
    ("Which ocean lies between Africa and Australia?", "The Indian Ocean", "The Atlantic", "The Arctic", "The Baltic"),
    ("What is the chemical symbol of gold?", "Au", "Ag", "Fe", "Pb"),
    ("Who wrote the play Hamlet?", "William Shakespeare", "Charles Dickens", "Jane Austen", "Mark Twain"),
    ("Which animal carries its house on its back?", "The snail", "The horse", "The eagle", "The salmon"),
    ("What do plants take from the air to make sugar?", "Carbon dioxide", "Helium", "Nitrogen", "Argon"),
    ("At what temperature in degrees Celsius does water boil at sea level?", "100", "50", "75", "250"),
    ("Which country has the city of Kyoto?", "Japan", "China", "Thailand", "India"),
    ("What is the largest desert of hot sand on Earth?", "The Sahara", "The Gobi", "The Namib", "The Mojave"),
    ("Which bone protects the brain?", "The skull", "The rib", "The hip", "The kneecap"),
    ("How many strings does a violin have?", "Four", "Six", "Eight", "Twelve"),
    ("What is the longest river in Africa?", "The Nile", "The Congo", "The Niger", "The Zambezi"),
    ("Which vitamin does the skin make in sunlight?", "Vitamin D", "Vitamin C", "Vitamin K", "Vitamin B12"),
    ("What is the square root of 81?", "9", "8", "7", "12"),
    ("Which mountain is the highest above the sea?", "Mount Everest", "Mont Blanc", "Kilimanjaro", "Mount Fuji"),
    ("What does a thermometer measure?", "Temperature", "Weight", "Distance", "Loudness"),
    ("Which bird can't fly but swims very well?", "The penguin", "The swallow", "The falcon", "The owl"),
    ("In which city does the Colosseum stand?", "Rome", "Athens", "Lisbon", "Cairo"),
    ("What force keeps the planets in their orbits?", "Gravity", "Friction", "Magnetism", "Wind"),
    ("Which metal is liquid at room temperature?", "Mercury", "Copper", "Silver", "Aluminium"),
    ("How many players of one team are on the field in football?", "Eleven", "Seven", "Nine", "Fifteen"),
    ("What is the main ingredient of bread?", "Flour", "Cheese", "Potatoes", "Honey"),
    ("Which sea lies between Europe and Africa?", "The Mediterranean", "The Black Sea", "The Red Sea", "The North Sea"),
    ("What do caterpillars turn into?", "Butterflies", "Beetles", "Spiders", "Ants"),
    ("Who painted the Mona Lisa?", "Leonardo da Vinci", "Vincent van Gogh", "Pablo Picasso", "Claude Monet"),
    ("Which part of a plant usually grows under the ground?", "The root", "The leaf", "The flower", "The fruit"),
    ("What is the currency of the United Kingdom?", "The pound", "The euro", "The dollar", "The franc"),
    ("How many bits are there in a byte?", "Eight", "Two", "Ten", "Sixteen"),
    ("Which gas makes up most of the air around us?", "Nitrogen", "Oxygen", "Hydrogen", "Methane"),
    ("What is the hardest material found in nature?", "Diamond", "Chalk", "Marble", "Amber"),
    ("Which country is shaped like a boot?", "Italy", "Norway", "Poland", "Greece"),
    ("What is the opposite of north on a compass?", "South", "East", "West", "Up"),
    ("Which organ do fish use to breathe?", "Gills", "Lungs", "Fins", "Scales"),
    ("How many zeros does the number one million have?", "Six", "Five", "Seven", "Nine"),
    ("What is the tallest animal on land?", "The giraffe", "The elephant", "The camel", "The moose"),
    ("Who found the theory of relativity?", "Albert Einstein", "Isaac Newton", "Marie Curie", "Charles Darwin"),
    ("What do we call molten rock that flows from a volcano?", "Lava", "Sand", "Coal", "Granite"),
    ("Which month has the fewest days?", "February", "April", "June", "November"),
]  # fmt: skip


def make_beginning() -> str:
    """Return what all contexts begin with."""
    return HEAD + "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in EXAMPLES)


def make_items() -> list[dict[str, object]]:
    """Return the items; the right answer's place is drawn with a fixed seed."""
    rng = random.Random(40)
    items: list[dict[str, object]] = []
    for number, (question, *answers) in enumerate(QUESTIONS, 1):
        choices = [f" {answer}" for answer in answers]
        right = choices[0]
        rng.shuffle(choices)
        context = f"{make_beginning()}Question: {question}\nAnswer:"
        items.append({"id": f"mc40-{number}", "context": context, "choices": choices, "answer": choices.index(right)})
    return items


def main() -> None:
    path = pathlib.Path(__file__).with_name("mc40.jsonl")
    path.write_text("".join(json.dumps(item) + "\n" for item in make_items()))


if __name__ == "__main__":
    main()
