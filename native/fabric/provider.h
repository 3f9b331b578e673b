// The providers that can be chosen, and how each is opened and waited for.
//
// tcp and shm are tested. efa and verbs take the same path; they have not been run on their hardware.
//
// shm is for processes that live and die together. Its peers share spin locks, so one that is killed (or stopped) while
// it holds one makes every thread that wants it spin, inside libfabric, for good (or until it continues). And a peer
// that was stopped copies, when it continues, what the source holds by then, even if its push was given up (against
// rule H3).

#ifndef PDSERVE_FABRIC_PROVIDER_H_
#define PDSERVE_FABRIC_PROVIDER_H_

#include <string>
#include <string_view>

#include "fabric/status.h"

namespace pdserve::fabric {

// What a bind host says.
enum class BindHost {
  kAddress,  // The local address of the NIC.
  kName,     // The name of the NIC's libfabric domain, without or with its ending ("-rdm"); empty: the first there is.
  kIgnored,  // There are no NICs to choose from.
};

struct Provider {
  std::string_view name;       // What the operator writes.
  const char* libfabric_name;  // What fi_getinfo takes.
  // The completion queue has a descriptor to poll. Without one the worker thread sleeps for bounded, growing times:
  // shm's fi_cq_sread ignores its timeout and spins.
  bool has_wait_fd;
  BindHost bind_host;
  // Each peer is written to from an endpoint of its own, for two reasons. On tcp closing it is all that stops a peer
  // that is gone from being sent, when it comes back, what the source holds by then (rule H3); fi_av_remove keeps the
  // connection. And shm 1.17 completes an endpoint's writes in the order of posting, so that one dead peer would hold
  // up the writes to all others.
  bool endpoint_per_peer;
  const char* advice;  // What to do when it can't be opened.
};

// Sets `*provider` to a static entry. Invalid, with the list of known names, when there is none called `name`.
Status FindProvider(std::string_view name, const Provider** provider);

// What to tell who wants to write from or to GPU memory with a provider that can't.
std::string DeviceMemoryAdvice(const Provider& provider);

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_PROVIDER_H_
