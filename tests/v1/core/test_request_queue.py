import random

from tests.v1.core.scripted_engine import make_request
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


def make_waiting(request_id: str, *precedence: float, n: int = 1) -> Request:
    message = make_request(request_id, [1], n=n)
    return Request(message, request_id, message.seeds, precedence, num_prompt_tokens=1, max_positions=1, num_scored=1)


def test_the_lowest_comes_first_whatever_was_pushed_when() -> None:
    queue, rng = RequestQueue(), random.Random(0)
    requests = [make_waiting(f"r{i}", i) for i in range(200)]
    for request in rng.sample(requests, 200):
        queue.push(request)
    gone = set(rng.sample(range(200), 150))
    for i in gone:
        queue.discard(requests[i])
    assert [queue.pop().request_id for _ in range(len(queue))] == [f"r{i}" for i in range(200) if i not in gone]


def test_children_stand_before_what_came_after_their_family() -> None:
    queue = RequestQueue()
    for request in (make_waiting("later", 2), make_waiting("1_fam", 1, 1), make_waiting("0_fam", 1, 0)):
        queue.push(request)
    assert [queue.pop().request_id for _ in range(3)] == ["0_fam", "1_fam", "later"]


def test_an_id_that_comes_back_does_not_take_the_place_of_the_one_that_left() -> None:
    queue = RequestQueue()
    first = make_waiting("id", 1)
    queue.push(first)
    queue.discard(first)
    queue.push(make_waiting("other", 2))
    queue.push(make_waiting("id", 3))
    assert [queue.pop().request_id for _ in range(2)] == ["other", "id"]


def test_what_is_discarded_leaves_no_dead_heap_behind() -> None:
    queue = RequestQueue()
    queue.push(make_waiting("patient", 0))
    for i in range(1, 1000):
        request = make_waiting(f"r{i}", i)
        queue.push(request)
        queue.discard(request)
    assert len(queue._heap) < 40
    assert len(queue) == 1


def test_a_family_counts_its_children() -> None:
    queue = RequestQueue()
    family = make_waiting("fam", 1, n=7)
    queue.push(family)
    assert queue.num_sequences == 7
    queue.discard(family)
    queue.discard(family)
    assert queue.num_sequences == 0
