#include "fabric/nic_addresses.h"

#include <algorithm>
#include <array>
#include <string>

namespace pdserve::fabric {
namespace {

constexpr std::array<uint8_t, 4> kMagic = {'p', 'd', 'n', '1'};
constexpr size_t kLengthBytes = 2;

Status Malformed(const std::string& what) {
  return Status::Invalid("connect", "the peer's address is malformed: " + what);
}

}  // namespace

std::vector<uint8_t> EncodeNicAddresses(std::span<const NicAddress> addresses) {
  std::vector<uint8_t> blob(kMagic.begin(), kMagic.end());
  blob.push_back(static_cast<uint8_t>(addresses.size()));
  for (const NicAddress& address : addresses) {
    blob.push_back(static_cast<uint8_t>(address.size()));
    blob.push_back(static_cast<uint8_t>(address.size() >> 8));
    blob.insert(blob.end(), address.begin(), address.end());
  }
  return blob;
}

Status DecodeNicAddresses(std::span<const uint8_t> blob, std::vector<NicAddress>* addresses) {
  if (blob.size() <= kMagic.size() || !std::equal(kMagic.begin(), kMagic.end(), blob.begin())) {
    return Malformed("it does not begin as a list of NICs");
  }
  const size_t num_nics = blob[kMagic.size()];
  if (num_nics < 1 || num_nics > kMaxNics) return Malformed(std::to_string(num_nics) + " NICs");
  std::vector<NicAddress> decoded;
  std::span<const uint8_t> rest = blob.subspan(kMagic.size() + 1);
  for (size_t nic = 0; nic < num_nics; ++nic) {
    if (rest.size() < kLengthBytes) return Malformed("it ends within NIC " + std::to_string(nic));
    const size_t num_bytes = rest[0] | rest[1] << 8;
    rest = rest.subspan(kLengthBytes);
    if (num_bytes < 1 || num_bytes > kMaxNicAddressBytes || num_bytes > rest.size()) {
      return Malformed("NIC " + std::to_string(nic) + " claims " + std::to_string(num_bytes) + " bytes");
    }
    decoded.emplace_back(rest.begin(), rest.begin() + num_bytes);
    rest = rest.subspan(num_bytes);
  }
  if (!rest.empty()) return Malformed(std::to_string(rest.size()) + " bytes after the last NIC");
  *addresses = std::move(decoded);
  return Status::Ok();
}

}  // namespace pdserve::fabric
