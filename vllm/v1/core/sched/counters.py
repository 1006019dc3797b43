"""What the scheduler counts since start-up."""

from dataclasses import dataclass

from vllm.v1.messages import SchedulerStats


@dataclass(slots=True)
class Counters:
    """The counting half of `SchedulerStats`; positions and rows count when their step has run."""

    num_computed_positions: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_nan_rows: int = 0
    num_scored_sample_rows: int = 0
    num_scored_prompt_rows: int = 0
    num_cached_prompt_rows: int = 0

    def make_stats(
        self, *, num_running: int, num_waiting: int, num_used_blocks: int, num_blocks: int
    ) -> SchedulerStats:
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_used_blocks=num_used_blocks,
            num_blocks=num_blocks,
            num_computed_positions=self.num_computed_positions,
            num_preemptions=self.num_preemptions,
            num_prefix_queries=self.num_prefix_queries,
            num_prefix_hits=self.num_prefix_hits,
            num_nan_rows=self.num_nan_rows,
            num_scored_sample_rows=self.num_scored_sample_rows,
            num_scored_prompt_rows=self.num_scored_prompt_rows,
            num_cached_prompt_rows=self.num_cached_prompt_rows,
        )
