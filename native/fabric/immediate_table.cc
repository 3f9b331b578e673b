#include "fabric/immediate_table.h"

#include <algorithm>
#include <string>

namespace pdserve::fabric {
namespace {

uint32_t SlotOf(uint32_t immediate) { return immediate >> kGenerationBits; }
uint32_t GenerationOf(uint32_t immediate) { return immediate & (kNumGenerations - 1); }

// Serial order: of two generations the later is the one that comes after fewer than half of all of them.
bool IsAtOrBefore(uint32_t generation, uint32_t closed) {
  return ((closed - generation) & (kNumGenerations - 1)) < kNumGenerations / 2;
}

}  // namespace

bool ImmediateTable::IsClosed(uint32_t immediate) const {
  const auto closed = closed_generations_.find(SlotOf(immediate));
  return closed != closed_generations_.end() && IsAtOrBefore(GenerationOf(immediate), closed->second);
}

uint64_t ImmediateTable::Arrive(std::span<const uint32_t> immediates, int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  uint64_t num_dropped = 0;
  for (const uint32_t immediate : immediates) {
    if (!ArriveOne(immediate, now_ns)) ++num_dropped;
  }
  return num_dropped;
}

bool ImmediateTable::ArriveOne(uint32_t immediate, int64_t now_ns) {
  auto found = counters_.find(immediate);
  if (found == counters_.end()) {
    if (IsClosed(immediate) || num_unexpected_ >= kMaxUnexpected || counters_.size() >= kMaxCounters) return false;
    found = counters_.emplace(immediate, Counter{}).first;
    found->second.made_by_arrival = true;
    ++num_unexpected_;
  }
  Counter& counter = found->second;
  now_ns = std::max(now_ns, counter.last_ns);
  if (counter.num_arrived == 0) counter.first_ns = now_ns;
  ++counter.num_arrived;
  counter.last_ns = now_ns;
  if (counter.expectation.has_value()) {
    if (counter.expectation->record_arrivals) counter.arrivals_ns.push_back(now_ns);
    LandIfComplete(immediate, counter);
  }
  return true;
}

Status ImmediateTable::Expect(const Expectation& expectation) {
  const uint32_t immediate = expectation.immediate;
  const std::lock_guard lock(mutex_);
  if (expectation.num_writes == 0) return Status::Invalid("expect", "at least one write must be expected");
  if (IsClosed(immediate)) {
    return Status::Invalid("expect", "immediate " + std::to_string(immediate) + " is of a closed generation");
  }
  auto found = counters_.find(immediate);
  if (found == counters_.end()) {
    if (counters_.size() >= kMaxCounters) {
      return Status::Capacity("expect", std::to_string(kMaxCounters) + " immediates are counted already");
    }
    found = counters_.emplace(immediate, Counter{}).first;
  }
  Counter& counter = found->second;
  if (counter.expectation.has_value()) {
    return Status::Invalid("expect", "immediate " + std::to_string(immediate) + " is expected already");
  }
  if (std::exchange(counter.made_by_arrival, false)) --num_unexpected_;
  counter.expectation = expectation;
  // What came before is known by its first and last instant alone.
  if (expectation.record_arrivals && counter.num_arrived > 0) {
    counter.arrivals_ns.assign(counter.num_arrived, counter.last_ns);
    counter.arrivals_ns.front() = counter.first_ns;
  }
  deadlines_.emplace(expectation.deadline_ns, immediate);
  NoteEarliestDeadline();
  LandIfComplete(immediate, counter);
  return Status::Ok();
}

void ImmediateTable::LandIfComplete(uint32_t immediate, Counter& counter) {
  if (counter.num_arrived < counter.expectation->num_writes) return;
  events_->Push(Landed{.immediate = immediate,
                       .num_writes = counter.num_arrived,
                       .first_ns = counter.first_ns,
                       .last_ns = counter.last_ns,
                       .arrivals_ns = std::move(counter.arrivals_ns)});
  EndExpectation(counter);
}

void ImmediateTable::EndExpectation(Counter& counter) {
  deadlines_.erase({counter.expectation->deadline_ns, counter.expectation->immediate});
  counter.expectation.reset();
  counter.arrivals_ns.clear();
  NoteEarliestDeadline();
}

void ImmediateTable::NoteEarliestDeadline() {
  earliest_deadline_ns_.store(deadlines_.empty() ? INT64_MAX : deadlines_.begin()->first, std::memory_order_relaxed);
}

void ImmediateTable::Forget(uint32_t immediate) {
  const std::lock_guard lock(mutex_);
  if (const auto found = counters_.find(immediate); found != counters_.end()) {
    if (found->second.expectation.has_value()) EndExpectation(found->second);
    if (found->second.made_by_arrival) --num_unexpected_;
    counters_.erase(found);
  }
  if (!IsClosed(immediate)) closed_generations_[SlotOf(immediate)] = GenerationOf(immediate);
}

void ImmediateTable::Expire(int64_t now_ns) {
  if (now_ns < earliest_deadline_ns_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex_);
  while (!deadlines_.empty() && deadlines_.begin()->first <= now_ns) {
    const uint32_t immediate = deadlines_.begin()->second;
    Counter& counter = counters_.at(immediate);
    events_->Push(ExpectationExpired{
        .immediate = immediate, .num_arrived = counter.num_arrived, .num_expected = counter.expectation->num_writes});
    EndExpectation(counter);
  }
}

}  // namespace pdserve::fabric
