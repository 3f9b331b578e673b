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

std::unique_ptr<Engine> OpenEngine() {
  std::unique_ptr<Engine> engine;
  CHECK(Engine::Open({.provider = "tcp", .bind_host = "127.0.0.1", .max_slice_bytes = 3 * kPageBytes + 512}, &engine)
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
  CHECK(initiator->Register(source.data(), kRegionBytes, &source_id).ok());
  CHECK(receiver->Register(target.data(), kRegionBytes, &exposed_id).ok());
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
  CHECK(initiator->Flush(1, peer_id, target_id, MonotonicNs() + 20'000'000'000).ok());
  CHECK(WaitForEvent<FlushEnded>(*initiator).delivered);
  CHECK(std::memcmp(source.data(), target.data(), kLayerBytes * kNumLayers) == 0);
  CHECK(receiver->Fence(descriptor).ok());
  CHECK(WaitForEvent<Fenced>(*receiver).exposure.num_bytes == kRegionBytes);
  CHECK(initiator->Disconnect(peer_id).ok());
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
  CHECK(Engine::Open({.provider = "carrier-pigeon", .bind_host = ""}, &engine).code() == Status::Code::kInvalid);
  const Status status = Engine::Open({.provider = "tcp", .bind_host = "192.0.2.77"}, &engine);
  CHECK(!status.ok() && !engine);
}

// The events, counters and table of a worker that is left behind, as Engine leaves its DataPlane.
struct LeftBehind {
  EventQueue events;
  FabricCounters counters;
  ImmediateTable immediates{&events};
  Worker worker{&events, &counters, &immediates};
  std::atomic<bool> is_released{false};
  std::atomic<bool> has_ended{false};
};

void WorkerThatHangsIsLeftBehindInBoundedTime() {
  static LeftBehind* const left = new LeftBehind();
  const Provider* provider;
  CHECK(FindProvider("tcp", &provider).ok());
  CHECK(left->worker.Start(*provider, "127.0.0.1", kMaxSliceBytes).ok());
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
  RUN(ClosedEngineRefusesAndDoesNotHang);
  RUN(UnknownProviderAndHostAreRefused);
  RUN(WorkerThatHangsIsLeftBehindInBoundedTime);
}
