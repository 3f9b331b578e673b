"""The pages of one KV pool: which are free, and how many owners the others have; who they are is theirs to know."""

from collections.abc import Sequence

from pdserve.errors import CapacityError, InternalError
from pdserve.ids import PageIndex

RETRY_AFTER_S = 1.0
"""Pages come back when a sequence ends, which takes seconds; the pool can't know better."""


class PagePool:
    """Hands out pages, counts their owners and takes them back from the last one.

    The free pages are a stack (LIFO), so the same calls give the same pages, and the page freed last, its bytes the
    likeliest to be in a cache, is used next. Released together, pages come out again in their old order, so runs of
    adjacent pages survive.

        [0 ............ num_pages)
        free (in the stack)  |  owned by all who got them from `allocate` or `share`, until they pass them to `release`

    A page with several owners is read by all and written by none.

    Threads: one.
    Cost: `allocate`, `share` and `release` O(1) a page, `audit` O(num_pages).
    """

    def __init__(self, *, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._free_stack = [PageIndex(index) for index in reversed(range(num_pages))]
        self._num_owners = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free_stack)

    @property
    def num_owners(self) -> tuple[int, ...]:
        """Of each page; 0 of a free one."""
        return tuple(self._num_owners)

    def allocate(self, num_pages: int) -> list[PageIndex]:
        """That many pages, now owned by the caller.

        Raises: `CapacityError` when fewer are free; nothing changed then.
        """
        if num_pages < 0:
            raise InternalError(f"asked for {num_pages} pages")
        if num_pages > self.num_free:
            raise CapacityError(
                f"{num_pages} pages wanted, {self.num_free} of {self.num_pages} are free", retry_after_s=RETRY_AFTER_S
            )
        first = self.num_free - num_pages
        page_indices = self._free_stack[first:]
        del self._free_stack[first:]
        page_indices.reverse()
        for page_index in page_indices:
            self._num_owners[page_index] = 1
        return page_indices

    def share(self, page_indices: Sequence[PageIndex]) -> None:
        """Each page has one more owner: the caller.

        Raises: `InternalError` for a page that is free or foreign; nothing changed then.
        """
        for page_index in page_indices:
            problem = self._problem(page_index)
            if problem is not None:
                raise InternalError(f"page {page_index} can't be shared: it {problem}")
        for page_index in page_indices:
            self._num_owners[page_index] += 1

    def release(self, page_indices: Sequence[PageIndex]) -> None:
        """Each page has one owner less, and is free when that was the last.

        Raises: `InternalError` for a page that is free already, foreign, or named more often than it has owners;
        nothing changed then.
        """
        freed: list[PageIndex] = []
        for position, page_index in enumerate(page_indices):
            problem = self._problem(page_index)
            if problem is not None:
                for counted in page_indices[:position]:
                    self._num_owners[counted] += 1
                raise InternalError(f"page {page_index} can't be released: it {problem}")
            self._num_owners[page_index] -= 1
            if self._num_owners[page_index] == 0:
                freed.append(page_index)
        self._free_stack.extend(reversed(freed))

    def audit(self, *, num_owned: int) -> None:
        """Check that free and owned pages make up the pool.

        Requires: `num_owned` counts the pages that have owners, each once, at the same moment.
        Raises: `InternalError` when a page leaked, or the books contradict each other.
        """
        if self.num_free + num_owned != self.num_pages:
            raise InternalError(f"of {self.num_pages} pages {self.num_free} are free and {num_owned} owned")
        if self._num_owners.count(0) != self.num_free or any(self._num_owners[index] for index in self._free_stack):
            raise InternalError("the stack of free pages and the counts of owners differ")

    def _problem(self, page_index: PageIndex) -> str | None:
        if not 0 <= page_index < self.num_pages:
            return f"is not one of the {self.num_pages} pages"
        return None if self._num_owners[page_index] else "is free already"
