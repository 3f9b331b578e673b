// Two engines over tcp in this process, for the sanitizers: the worker threads, the watcher and the calling thread.

#include "fabric/engine.h"

#include <poll.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/check.h"

namespace pdserve::fabric {
namespace {

constexpr uint64_t kPageBytes = 16384;
constexpr uint32_t kNumPages = 32;
constexpr uint32_t kNumLayers = 4;
constexpr uint64_t kLayerBytes = kPageBytes * kNumPages;
constexpr uint64_t kRegionBytes = kLayerBytes * kNumLayers + 4096;

std::unique_ptr<Engine> OpenEngine(std::vector<Engine::GroupOptions> groups = {{{"127.0.0.1"}, {}}}) {
  std::unique_ptr<Engine> engine;
  CHECK(Engine::Open({.provider = "tcp", .groups = std::move(groups), .max_slice_bytes = 3 * kPageBytes + 512}, &engine)
            .ok());
  return engine;
}

template <typename Kind>
Kind WaitForEvent(Engine& engine) {
  pollfd polled = {engine.event_fd(), POLLIN, 0};
  CHECK(poll(&polled, 1, 20'000) == 1);
  std::vector<Event> events = engine.Poll();
  CHECK(events.size() == 1);
  return std::get<Kind>(events[0]);
}

void PushOfLayersLandsAndIsFlushed() {
  std::vector<char> source(kRegionBytes);
  std::vector<char> target(kRegionBytes);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<char>(i * 31 + i / 251);
  auto counter = std::make_unique<LayerCounter>();
  const std::unique_ptr<Engine> initiator = OpenEngine();
  const std::unique_ptr<Engine> receiver = OpenEngine();

  uint32_t source_id, exposed_id, peer_id, target_id;
  RegionDescriptor descriptor;
  CHECK(initiator->Watch(reinterpret_cast<char*>(counter.get()), sizeof(LayerCounter)).ok());
  CHECK(initiator->Register({source.data(), kRegionBytes}, 0, &source_id).ok());
  CHECK(receiver->Register({target.data(), kRegionBytes}, 0, &exposed_id).ok());
  CHECK(receiver->Expose(exposed_id, &descriptor).ok());
  CHECK(descriptor.slices.size() > 10);
  CHECK(initiator->Connect(receiver->address(), &peer_id).ok());
  CHECK(initiator->Attach(peer_id, descriptor, &target_id).ok());

  std::vector<uint32_t> pages(kNumPages);
  for (uint32_t page = 0; page < kNumPages; ++page) pages[page] = page;
  CHECK(receiver->Expect({7, kNumPages * kNumLayers, MonotonicNs() + 20'000'000'000, true}).ok());
  CHECK(initiator
            ->Arm({.push_id = 1,
                   .peer_id = peer_id,
                   .source = source_id,
                   .target = target_id,
                   .immediate = 7,
                   .source_pages = {pages, 0, kPageBytes, kLayerBytes},
                   .target_pages = {pages, 0, kPageBytes, kLayerBytes},
                   .num_layers = kNumLayers,
                   .run_bytes = kPageBytes,
                   .first_due_tick = 1})
            .ok());
  for (uint32_t layer = 0; layer < kNumLayers; ++layer) counter->Tick();
  CHECK(WaitForEvent<PushEnded>(*initiator).outcome == PushOutcome::kDone);
  CHECK(WaitForEvent<Landed>(*receiver).num_writes == kNumPages * kNumLayers);
  CHECK(initiator->Flush(1, peer_id, {{target_id}}, MonotonicNs() + 20'000'000'000).ok());
  CHECK(WaitForEvent<FlushEnded>(*initiator).delivered);
  CHECK(std::memcmp(source.data(), target.data(), kLayerBytes * kNumLayers) == 0);
  CHECK(receiver->Fence(descriptor).ok());
  CHECK(WaitForEvent<Fenced>(*receiver).exposure.num_bytes == kRegionBytes);
  CHECK(initiator->Disconnect(peer_id).ok());
}

// Two groups on each side write and count at the same time; the sanitizers watch what they share.
void GroupsCountTogetherAndFlushTogether() {
  constexpr size_t kNumGroups = 2;
  // Outlive the engines.
  std::vector<char> source(kRegionBytes, 'x');
  std::vector<std::vector<char>> targets(kNumGroups, std::vector<char>(kRegionBytes));
  auto counter = std::make_unique<LayerCounter>();
  const std::unique_ptr<Engine> initiator = OpenEngine({{{"127.0.1.1", "127.0.1.2"}, {}}, {{"127.0.1.3"}, {}}});
  const std::unique_ptr<Engine> receiver = OpenEngine({{{"127.0.2.1"}, {}}, {{"127.0.2.2", "127.0.2.3"}, {}}});
  CHECK(initiator->Watch(reinterpret_cast<char*>(counter.get()), sizeof(LayerCounter)).ok());
  uint32_t peer_id;
  CHECK(initiator->Connect(receiver->address(), &peer_id).ok());
  std::vector<uint32_t> pages(kNumPages), target_ids(kNumGroups);
  for (uint32_t page = 0; page < kNumPages; ++page) pages[page] = page;
  CHECK(receiver->Expect({7, kNumGroups * kNumPages * kNumLayers, MonotonicNs() + 20'000'000'000, true}).ok());
  std::vector<RegionDescriptor> exposures(kNumGroups);
  for (size_t group = 0; group < kNumGroups; ++group) {
    uint32_t source_id, exposed_id;
    CHECK(initiator->Register({source.data(), kRegionBytes}, group, &source_id).ok());
    CHECK(receiver->Register({targets[group].data(), kRegionBytes}, group, &exposed_id).ok());
    CHECK(receiver->Expose(exposed_id, &exposures[group]).ok());
    CHECK(initiator->Attach(peer_id, exposures[group], &target_ids[group]).ok());
    CHECK(initiator
              ->Arm({.push_id = group,
                     .peer_id = peer_id,
                     .source = source_id,
                     .target = target_ids[group],
                     .immediate = 7,
                     .source_pages = {pages, 0, kPageBytes, kLayerBytes},
                     .target_pages = {pages, 0, kPageBytes, kLayerBytes},
                     .num_layers = kNumLayers,
                     .run_bytes = kPageBytes,
                     .first_due_tick = 1})
              .ok());
  }
  for (uint32_t layer = 0; layer < kNumLayers; ++layer) counter->Tick();
  const Landed landed = WaitForEvent<Landed>(*receiver);
  CHECK(landed.num_writes == kNumGroups * kNumPages * kNumLayers);
  for (const std::vector<char>& target : targets)
    CHECK(std::memcmp(source.data(), target.data(), kRegionBytes - 4096) == 0);
  size_t num_ended = 0;
  tests::WaitUntil([&] { return (num_ended += initiator->Poll().size()) == kNumGroups; });
  const uint64_t num_posted = initiator->Total(&FabricCounters::num_writes_posted);
  CHECK(initiator->Flush(1, peer_id, target_ids, MonotonicNs() + 20'000'000'000).ok());
  CHECK(WaitForEvent<FlushEnded>(*initiator).delivered);
  CHECK(initiator->Total(&FabricCounters::num_writes_posted) == num_posted + 4);  // Two pairs from each group.
  for (const RegionDescriptor& exposure : exposures) CHECK(receiver->Fence(exposure).ok());
  num_ended = 0;
  tests::WaitUntil([&] { return (num_ended += receiver->Poll().size()) == kNumGroups; });
}

void ClosedEngineRefusesAndDoesNotHang() {
  const std::unique_ptr<Engine> engine = OpenEngine();
  engine->Close();
  uint32_t peer_id;
  CHECK(!engine->Connect(engine->address(), &peer_id).ok());
  CHECK(engine->Poll().empty());
}

void UnknownProviderAndHostAreRefused() {
  std::unique_ptr<Engine> engine;
  const std::vector<Engine::GroupOptions> here = {{{"127.0.0.1"}, {}}};
  CHECK(Engine::Open({.provider = "carrier-pigeon", .groups = here}, &engine).code() == Status::Code::kInvalid);
  const Status status = Engine::Open({.provider = "tcp", .groups = {{{"127.0.0.1", "192.0.2.77"}, {}}}}, &engine);
  CHECK(!status.ok() && !engine);
}

void GroupsThatCanNotBeAreRefused() {
  std::unique_ptr<Engine> engine;
  const std::vector<std::string> too_many(kMaxNics + 1, "127.0.0.1");
  for (const std::vector<Engine::GroupOptions>& groups :
       std::vector<std::vector<Engine::GroupOptions>>{{}, {{{}, {}}}, {{too_many, {}}}, {{{"127.0.0.1"}, {999'999}}}}) {
    CHECK(Engine::Open({.provider = "tcp", .groups = groups}, &engine).code() == Status::Code::kInvalid);
  }
  const Status status = Engine::Open({.provider = "shm", .groups = {{{"", ""}, {}}}}, &engine);
  CHECK(status.code() == Status::Code::kInvalid && status.message().find("one NIC") != std::string::npos);
}

// The events, counters and table of a worker that is left behind, as Engine leaves its DataPlane.
struct LeftBehind {
  EventQueue events;
  FabricCounters counters{1};
  ImmediateTable immediates{&events};
  Worker worker{&events, &counters, &immediates, [](uint32_t, int) {}};
  std::atomic<bool> is_released{false};
  std::atomic<bool> has_ended{false};
};

void WorkerThatHangsIsLeftBehindInBoundedTime() {
  static LeftBehind* const left = new LeftBehind();
  const Provider* provider;
  CHECK(FindProvider("tcp", &provider).ok());
  CHECK(left->worker.Start({.provider = provider, .group = {.bind_hosts = {"127.0.0.1"}}, .cpus = {}}).ok());
  CHECK(left->worker
            .Put([] {
              while (!left->is_released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
              left->has_ended = true;
            })
            .ok());
  CHECK(!left->worker.Stop(std::chrono::milliseconds(50)));
  CHECK(!left->worker.Stop());
  CHECK(!left->worker.Put([] {}).ok());
  left->is_released = true;
  tests::WaitUntil([] { return left->has_ended.load(); });
}

}  // namespace
}  // namespace pdserve::fabric

int main() {
  using namespace pdserve::fabric;
  RUN(PushOfLayersLandsAndIsFlushed);
  RUN(GroupsCountTogetherAndFlushTogether);
  RUN(GroupsThatCanNotBeAreRefused);
  RUN(ClosedEngineRefusesAndDoesNotHang);
  RUN(UnknownProviderAndHostAreRefused);
  RUN(WorkerThatHangsIsLeftBehindInBoundedTime);
}
