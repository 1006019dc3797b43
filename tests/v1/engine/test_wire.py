"""What crosses between the processes arrives as it was sent, and nothing crosses that would have to be pickled."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.config import (
    AttentionConfig,
    LayerConfig,
    LoadConfig,
    MlpConfig,
    ModelConfig,
    RopeConfig,
    TransformerConfig,
    VllmConfig,
)
from vllm.exceptions import ModelLoadError, VLLMServerError, VLLMUnsupportedError, VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.logprobs.block import LogprobsBlock, WholeRows
from vllm.logprobs.rows import EMPTY_SLOT
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.wire import (
    AddRequest,
    Answer,
    Call,
    Decoder,
    Encoder,
    ErrorReport,
    MessageFromCore,
    MessageToCore,
    StartUp,
    StepDone,
    read_unreadable_request,
)
from vllm.v1.messages import (
    DecodeBatchTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    PromptScores,
    RowRange,
    SchedulerStats,
)

VOCAB = 7


def send(message: Any, shift: int = 0) -> Any:
    """Return what arrives of a message from the core; each frame begins `shift` bytes off a fresh buffer's start."""
    frames = []
    for frame in Encoder().encode(message):
        moved = bytearray(shift) + bytes(frame)
        frames.append(memoryview(moved)[shift:])
    return Decoder(MessageFromCore).decode(frames)


def make_outputs(**blocks: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id="0_a-00000000",
                new_token_ids=[3],
                rows=RowRange(0, 1),
                full_rows=blocks.get("full_rows"),
                finish_reason=FinishReason.STOP,
                stop_reason=3,
                num_cached_tokens=2,
            ),
            EngineCoreOutput(request_id="b", new_token_ids=[], finish_reason=FinishReason.ERROR, error="no numbers"),
        ],
        prompt_scores=[PromptScores(request_id="b", full_rows=blocks.get("full_rows"))],
        decode_batch=DecodeBatchTokens(request_ids=["c", "d"], token_ids=[4, 5], rows=[1]),
        logprobs=blocks.get("logprobs"),
        stats=SchedulerStats(num_running=1, num_nan_rows=2),
        timestamp=1.5,
    )


def make_block(num_entries: list[int], width: int) -> LogprobsBlock:
    ids = np.arange(len(num_entries) * width, dtype=np.int32).reshape(len(num_entries), width)
    values = -ids.astype(np.float32) / 3
    ids[np.arange(width) >= np.array(num_entries, np.int32).reshape(-1, 1)] = EMPTY_SLOT
    return LogprobsBlock.of_rectangle(ids, values, np.abs(ids) + 1)


def make_whole_rows(num_rows: int) -> WholeRows:
    values = -np.random.default_rng(1).random((num_rows, VOCAB), dtype=np.float32)
    ranks = (np.argsort(np.argsort(-values, axis=1), axis=1) + 1).astype(np.int32)
    return WholeRows(np.arange(num_rows, dtype=np.int32), values, ranks)


@given(
    num_entries=st.lists(st.integers(1, VOCAB), max_size=6),
    spare=st.sampled_from([0, 1, 50]),
    shift=st.integers(0, 7),
)
def test_a_steps_rows_arrive_bit_for_bit_wherever_the_frames_lie_in_memory(
    num_entries: list[int], spare: int, shift: int
) -> None:
    block = make_block(num_entries, max(num_entries, default=1) + spare)
    arrived = send(StepDone(make_outputs(logprobs=block), True, 1), shift).outputs.logprobs
    assert isinstance(arrived, LogprobsBlock)
    assert list(arrived.split()) == list(block.split())
    assert arrived.get_chosen_values().tolist() == block.get_chosen_values().tolist()
    assert len(arrived.split()) == len(num_entries)


@pytest.mark.parametrize("num_entries", [[6, 5, 6], [1, 1, 6], [1, 1, 1]])
@pytest.mark.parametrize("shift", [0, 3])
def test_a_rectangle_arrives_and_its_gaps_stay_at_home(num_entries: list[int], shift: int) -> None:
    block = make_block(num_entries, max(num_entries) + (num_entries == [1, 1, 1]) * 50)
    message = StepDone(make_outputs(logprobs=block), True, 1)
    num_bytes = sum(memoryview(frame).nbytes for frame in Encoder().encode(message)[1:])
    assert num_bytes <= 2 * 12 * sum(num_entries) + 60
    arrived = send(message, shift).outputs.logprobs
    assert FlatLogprobs.of_rows([*arrived.split()]) == FlatLogprobs.of_rows([*block.split()])


def test_whole_rows_arrive_in_their_pieces() -> None:
    pieces = [make_whole_rows(3), make_whole_rows(1)]
    message = send(StepDone(make_outputs(full_rows=pieces), True, 1), shift=3)
    for arrived in (message.outputs.outputs[0].full_rows, message.outputs.prompt_scores[0].full_rows):
        assert [type(piece) for piece in arrived] == [WholeRows, WholeRows]
        for mine, sent in zip(arrived, pieces, strict=True):
            for column, sent_column in zip(mine, sent, strict=True):
                assert column.dtype == sent_column.dtype and column.tobytes() == sent_column.tobytes()
        assert FlatLogprobs.of_rows(arrived[0].split()) == FlatLogprobs.of_rows(pieces[0].split())


def test_a_part_of_whole_rows_travels_without_the_rest_of_them() -> None:
    whole = make_whole_rows(4)
    part = WholeRows(*(column[2:3] for column in whole))
    frames = Encoder().encode(StepDone(make_outputs(full_rows=[part]), True, 1))
    assert sum(memoryview(frame).nbytes for frame in frames[1:]) == 2 * (4 + 8 * VOCAB)  # stands there twice
    (arrived,) = send(StepDone(make_outputs(full_rows=[part]), True, 1)).outputs.outputs[0].full_rows
    assert FlatLogprobs.of_rows(arrived.split()) == FlatLogprobs.of_rows(whole.split())[2:3]


def test_arrays_travel_beside_the_message_and_are_not_copied_into_it() -> None:
    values = np.arange(1000, dtype=np.float32)
    head, frame = Encoder().encode(Answer(1, values))
    assert len(head) < 100
    assert np.shares_memory(np.asarray(frame), values)


def test_whatever_else_an_output_says_arrives() -> None:
    outputs = make_outputs()
    message = send(StepDone(outputs, False, 12))
    assert message == StepDone(outputs, False, 12)
    assert isinstance(message.outputs.outputs[0].finish_reason, FinishReason)
    assert isinstance(message.outputs.outputs[0].rows, RowRange)


def test_a_request_arrives_with_its_resolved_params_and_64_bit_seeds() -> None:
    class Words:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [1, 2]

    params = SamplingParams(
        n=3,
        seed=2**64 - 1,
        logprobs=-1,
        prompt_logprobs=2,
        stop=["x"],
        bad_words=["y"],
        min_tokens=2,
        logit_bias={3: -1.5, 4: float("-inf")},
        allowed_token_ids=[1, 2],
        output_kind=RequestOutputKind.DELTA,
    ).resolve(
        vocab_size=50,
        max_model_len=40,
        prompt_len=2,
        max_logprobs=-1,
        eos_token_id=2,
        extra_eos_token_ids=[5],
        tokenizer=Words(),
    )
    request = EngineCoreRequest(
        request_id="ä-00000000",
        prompt_token_ids=[4, 5],
        sampling_params=params,
        seeds=[2**64 - 1, 0, 1],
        eos_token_id=2,
        bad_words_token_ids=[[1, 2]],
        cache_salt="s",
    )
    arrived = Decoder(MessageToCore).decode(Encoder().encode(AddRequest(request)))
    assert arrived == AddRequest(request)
    assert arrived.request.sampling_params.bad_words_token_ids == params.bad_words_token_ids


def test_a_request_that_breaks_a_rule_on_arrival_can_still_be_answered() -> None:
    params = SamplingParams()
    params.temperature = -1.0  # set behind the constructor's back
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, seeds=[1, 2])
    frames = Encoder().encode(AddRequest(request))
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        Decoder(MessageToCore).decode(frames)
    assert read_unreadable_request(frames) == ("r", 2)
    assert read_unreadable_request(Encoder().encode(Call(1, "get_stats"))) is None


@pytest.mark.parametrize("value", [object(), print, np.array([object()]), {"a": [lambda: None]}])
def test_what_would_have_to_be_pickled_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="can't travel"):
        Encoder().encode(Answer(1, value))


def test_an_encoder_is_good_after_a_refusal() -> None:
    encoder = Encoder()
    with pytest.raises(TypeError):
        encoder.encode(Answer(1, [np.zeros(3), object()]))
    frames = encoder.encode(Answer(2, {"a": [np.arange(6).reshape(2, 3), np.float32(0.5)], "b": np.zeros(0)}))
    answer = Decoder(MessageFromCore).decode(frames)
    assert answer.number == 2
    assert answer.value["a"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert answer.value["a"][1] == 0.5 and answer.value["b"].shape == (0,)


@pytest.mark.parametrize(
    "error",
    [
        VLLMValidationError("n must be 1; got 2", parameter="n", value=2),
        VLLMUnsupportedError("not served", parameter="lora_request"),
        ModelLoadError("config.json is not there"),
        TypeError("not a list"),
        ValueError("bad cores"),
    ],
)
def test_an_error_is_rebuilt_as_it_was(error: Exception) -> None:
    report = msgspec.msgpack.decode(msgspec.msgpack.encode(ErrorReport.of(error)), type=ErrorReport)
    rebuilt = report.rebuild()
    assert type(rebuilt) is type(error)
    assert str(rebuilt) == str(error)
    assert vars(rebuilt) == vars(error)


def test_an_error_of_another_kind_keeps_its_name_and_text() -> None:
    rebuilt = ErrorReport.of(RuntimeError("out of memory")).rebuild()
    assert type(rebuilt) is VLLMServerError
    assert str(rebuilt) == "RuntimeError: out of memory"
    assert type(ErrorReport.of(EngineDeadError("gone")).rebuild()) is VLLMServerError
    huge = ErrorReport.of(VLLMValidationError("too large", value=10**30)).rebuild()
    assert isinstance(huge, VLLMValidationError) and huge.value == str(10**30)


def test_a_configuration_arrives_whole() -> None:
    attention = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, sliding_window=7)
    transformer = TransformerConfig(
        architecture="LlamaForCausalLM",
        vocab_size=9,
        hidden_size=8,
        max_position_embeddings=64,
        layers=(LayerConfig(attention=attention, mlp=MlpConfig(size=8)),) * 2,
        ropes=(RopeConfig(rotary_dim=4, scaling={"rope_type": "llama3", "factor": 8.0}),),
    )
    config = VllmConfig(
        model_config=ModelConfig(
            model="m",
            path="/m",
            tokenizer="/m",
            transformer=transformer,
            max_model_len=64,
            generation_config={"temperature": 0.5, "eos_token_id": [1, 2]},
            generation_eos_token_ids=(1, 2),
        ),
        load_config=LoadConfig(hf_token="secret"),
    )
    start_up = StartUp(vllm_config=config, folder="/tmp/x", parent_pid=1, steps_on_demand=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(start_up), type=StartUp) == start_up
