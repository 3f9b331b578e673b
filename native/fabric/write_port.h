// Where the sender hands its writes to: the NICs of a domain group in production, a script in the native tests.

#ifndef PDSERVE_FABRIC_WRITE_PORT_H_
#define PDSERVE_FABRIC_WRITE_PORT_H_

#include <rdma/fabric.h>

#include <cstdint>
#include <span>

#include "fabric/region.h"
#include "fabric/status.h"

namespace pdserve::fabric {

// How a NIC of a peer is reached from one of ours.
struct PeerRoute {
  uint32_t local_nic;  // Index into the group's.
  fid_ep* endpoint;
  fi_addr_t address;
};

struct WriteRequest {
  Piece piece;
  PeerRoute route;
  bool has_immediate;
  uint32_t immediate;
  // The completion means that the bytes are in the peer's memory, not only that the source may be reused.
  bool delivery_complete;
  void* context;
};

class WritePort {
 public:
  virtual ~WritePort() = default;
  // Connects nothing yet; a peer that is not there is found by the first write.
  virtual Status OpenRoute(uint32_t local_nic, std::span<const uint8_t> address, PeerRoute* route) = 0;
  // What is still in flight on the route may never complete.
  virtual void CloseRoute(const PeerRoute& route) = 0;
  // 0 when accepted: exactly one completion with `context` follows. Otherwise a positive errno and no completion;
  // EAGAIN asks to try again after progress, and may never end: the caller keeps a deadline.
  virtual int Write(const WriteRequest& request) = 0;
};

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_WRITE_PORT_H_
