"""The books of pages and sequences that tests of the scheduler keep a second time."""

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from pdserve.ids import PageIndex
from pdserve.kv.pages import PagePool
from pdserve.schedule.sequence import Sequence


class CountedPool(PagePool):
    """Counts owners a second time."""

    def __init__(self, *, num_pages: int) -> None:
        super().__init__(num_pages=num_pages)
        self.owners: Counter[PageIndex] = Counter()

    def allocate(self, num_pages: int) -> list[PageIndex]:
        page_indices = super().allocate(num_pages)
        self.owners.update(page_indices)
        return page_indices

    def share(self, page_indices: Many[PageIndex]) -> None:
        super().share(page_indices)
        self.owners.update(page_indices)

    def release(self, page_indices: Many[PageIndex]) -> None:
        super().release(page_indices)
        self.owners -= Counter(page_indices)


@dataclass
class Expected:
    """What we know of a sequence without asking the scheduler."""

    sequence: Sequence
    num_written: int = 0
    """Tokens `[0, num_written)` have their KV in the pages that the sequence holds now."""
    token_ids: list[int] = field(default_factory=list[int])

    @property
    def generates(self) -> bool:
        return self.sequence.sampling is not None

    @property
    def num_remaining(self) -> int:
        return len(self.token_ids) - (not self.generates) - self.num_written

    @property
    def is_finished(self) -> bool:
        sampling = self.sequence.sampling
        return sampling is not None and len(self.token_ids) >= self.sequence.num_prompt_tokens + sampling.max_tokens
