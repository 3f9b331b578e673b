"""The page pool against a list of owners."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.errors import CapacityError, InternalError
from pdserve.ids import PageIndex
from pdserve.kv.pages import PagePool

NUM_PAGES = 12


class PagePoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=NUM_PAGES)
        self.owned: list[list[PageIndex]] = []

    def owned_pages(self) -> Counter[PageIndex]:
        """Pages by how many owners they have."""
        return Counter(page for pages in self.owned for page in pages)

    @rule(num_pages=st.integers(0, NUM_PAGES + 1))
    def allocate(self, num_pages: int) -> None:
        if num_pages > NUM_PAGES - len(self.owned_pages()):
            with pytest.raises(CapacityError):
                self.pool.allocate(num_pages)
            return
        pages = self.pool.allocate(num_pages)
        assert len(set(pages)) == num_pages
        assert not set(pages) & set(self.owned_pages())
        assert all(0 <= page < NUM_PAGES for page in pages)
        self.owned.append(pages)

    @rule(choice=st.integers(0, 100), num_pages=st.integers(1, NUM_PAGES))
    def share(self, choice: int, num_pages: int) -> None:
        if self.owned:
            pages = self.owned[choice % len(self.owned)][:num_pages]
            self.pool.share(pages)
            self.owned.append(pages)

    @rule(choice=st.integers(0, 100))
    def share_with_a_free_page(self, choice: int) -> None:
        free = sorted(set(range(NUM_PAGES)) - set(self.owned_pages()))
        pages = self.owned[choice % len(self.owned)] if self.owned else []
        with pytest.raises(InternalError):
            self.pool.share([*pages, PageIndex(free[choice % len(free)] if free else NUM_PAGES)])

    @rule(choice=st.integers(0, 100))
    def release(self, choice: int) -> None:
        if self.owned:
            self.pool.release(self.owned.pop(choice % len(self.owned)))

    @rule(choice=st.integers(0, 100), foreign=st.sampled_from([-1, NUM_PAGES]))
    def release_with_a_foreign_page(self, choice: int, foreign: int) -> None:
        pages = self.owned[choice % len(self.owned)] if self.owned else []
        with pytest.raises(InternalError):
            self.pool.release([*pages, PageIndex(foreign)])

    @rule(choice=st.integers(0, 100))
    def release_once_too_often(self, choice: int) -> None:
        pages = self.owned[choice % len(self.owned)] if self.owned else []
        if pages:
            with pytest.raises(InternalError):
                self.pool.release([*pages, *[pages[0]] * self.owned_pages()[pages[0]]])

    def teardown(self) -> None:
        """The counts were right if each owner can release once, and the last release frees."""
        for pages in self.owned:
            self.pool.release(pages)
        self.pool.audit(num_owned=0)

    @invariant()
    def pages_are_conserved(self) -> None:
        assert self.pool.num_free + len(self.owned_pages()) == NUM_PAGES
        self.pool.audit(num_owned=len(self.owned_pages()))


TestPagePoolMachine = PagePoolMachine.TestCase
TestPagePoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pages_of_a_new_pool_come_in_ascending_order() -> None:
    pool = PagePool(num_pages=5)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]


def test_pages_released_together_come_back_in_order() -> None:
    pool = PagePool(num_pages=5)
    pages = pool.allocate(4)
    pool.release(pages)
    assert pool.allocate(4) == pages


def test_page_release_of_a_free_page_changes_nothing() -> None:
    pool = PagePool(num_pages=4)
    pages = pool.allocate(2)
    with pytest.raises(InternalError, match="page 3 can't be released: it is free already"):
        pool.release([*pages, PageIndex(3)])
    pool.audit(num_owned=2)
    pool.release(pages)
    pool.audit(num_owned=0)


def test_page_with_two_owners_is_free_after_the_second_release() -> None:
    pool = PagePool(num_pages=4)
    pages = pool.allocate(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free == 3
    pool.audit(num_owned=1)
    pool.release(pages[:1])
    assert pool.allocate(1) == pages[:1], "freed last, used next"


@pytest.mark.parametrize(("page_index", "problem"), [(3, "is free already"), (4, "is not one of the 4 pages")])
def test_page_share_of_a_page_without_owner_changes_nothing(page_index: int, problem: str) -> None:
    pool = PagePool(num_pages=4)
    pages = pool.allocate(2)
    with pytest.raises(InternalError, match=f"page {page_index} can't be shared: it {problem}"):
        pool.share([*pages, PageIndex(page_index)])
    pool.release(pages)
    pool.audit(num_owned=0)


def test_page_shortage_names_what_is_free_and_when_to_return() -> None:
    pool = PagePool(num_pages=4)
    pool.allocate(3)
    with pytest.raises(CapacityError, match="2 pages wanted, 1 of 4 are free") as caught:
        pool.allocate(2)
    assert caught.value.retry_after_s > 0
    assert pool.num_free == 1


def test_page_audit_finds_a_leak() -> None:
    pool = PagePool(num_pages=4)
    pool.allocate(3)
    with pytest.raises(InternalError, match="1 are free and 2 owned"):
        pool.audit(num_owned=2)


@pytest.mark.parametrize("num_pages", [0, -1])
def test_page_pool_without_pages_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(num_pages=num_pages)


def test_page_allocation_of_a_negative_number_is_a_bug() -> None:
    with pytest.raises(InternalError):
        PagePool(num_pages=2).allocate(-1)
