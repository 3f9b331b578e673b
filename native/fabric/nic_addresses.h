// The addresses of all NICs of a fabric, as the one blob that a peer passes to Connect.
//
//   blob    = "pdn1" count nic*     (as many as count says)
//   nic     = length address
//   count   = 1 to kMaxNics, one byte
//   length  = 1 to kMaxNicAddressBytes, two bytes, the low one first
//   address = what fi_getname says of the NIC's endpoint; its length and form are the provider's
//
// NICs are named by their place in it: first those of the first domain group, in order, then those of the next.
//
// Example: "pdn1" 01 10 00 and the 16 bytes of a sockaddr_in, for a fabric of one NIC over tcp.

#ifndef PDSERVE_FABRIC_NIC_ADDRESSES_H_
#define PDSERVE_FABRIC_NIC_ADDRESSES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "fabric/status.h"

namespace pdserve::fabric {

// 16 devices with 4 NICs each; the blob travels in a handshake and stays under 17 KiB.
inline constexpr size_t kMaxNics = 64;

// shm's are the longest: a name in /dev/shm.
inline constexpr size_t kMaxNicAddressBytes = 256;

using NicAddress = std::vector<uint8_t>;

// REQUIRES: 1 to kMaxNics addresses of 1 to kMaxNicAddressBytes.
std::vector<uint8_t> EncodeNicAddresses(std::span<const NicAddress> addresses);

// Invalid, with nothing decoded, unless the blob is well formed to its last byte.
Status DecodeNicAddresses(std::span<const uint8_t> blob, std::vector<NicAddress>* addresses);

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_NIC_ADDRESSES_H_
