// The providers that can be chosen, and how each is opened and waited for.
//
// tcp and shm are tested. efa and verbs take the same path; they have not been run on their hardware.

#ifndef PDSERVE_FABRIC_PROVIDER_H_
#define PDSERVE_FABRIC_PROVIDER_H_

#include <string>
#include <string_view>

#include "fabric/status.h"

namespace pdserve::fabric {

struct Provider {
  std::string_view name;       // What the operator writes.
  const char* libfabric_name;  // What fi_getinfo takes.
  // The completion queue has a descriptor to poll. Without one the worker thread sleeps for bounded, growing times:
  // shm's fi_cq_sread ignores its timeout and spins.
  bool has_wait_fd;
  bool takes_bind_host;
  // Each peer is written to from an endpoint of its own: shm 1.17 completes an endpoint's writes in the order of
  // posting, so that one dead peer would hold up the writes to all others.
  bool endpoint_per_peer;
  const char* advice;  // What to do when it can't be opened.
};

// Sets `*provider` to a static entry. Invalid, with the list of known names, when there is none called `name`.
Status FindProvider(std::string_view name, const Provider** provider);

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_PROVIDER_H_
