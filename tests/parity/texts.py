"""Texts that the real model is compared on."""

ENGLISH = (
    "The lighthouse keeper wrote in his journal every evening, even when nothing had happened, because he believed "
    "that a day without a sentence was a day that the sea had taken."
)
CODE = """def merge(left, right):
    out = []
    while left and right:
        out.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return out + left + right
"""
EMOJI_AND_CJK = "Thank you 🙏🏽 for the 寿司! 今日はとても楽しかった。👩‍👩‍👧 see you 明天 🚀"
# About 700 tokens of the project's own prose.
LONG = " ".join(
    f"On day {day} the survey party walked {3 * day + 2} kilometres along the river and counted "
    f"{day * day % 17 + 4} herons, {day % 5} otters and one {('boat', 'bridge', 'mill', 'ford')[day % 4]}; "
    f"the rain {('held off', 'came late', 'never stopped')[day % 3]}."
    for day in range(1, 19)
)
ALL = {"english": ENGLISH, "code": CODE, "emoji and cjk": EMOJI_AND_CJK, "700 tokens": LONG}
