// How NICs are named: to a peer by addresses, to libfabric by the name of a domain.

#include <cstring>
#include <memory>
#include <vector>

#include "fabric/domain.h"
#include "fabric/nic_addresses.h"
#include "tests/check.h"

namespace pdserve::fabric {
namespace {

const std::vector<NicAddress> kAddresses = {{1, 2, 3}, NicAddress(kMaxNicAddressBytes, 7), {9}};

void DecodingGivesWhatWasEncoded() {
  std::vector<NicAddress> decoded;
  CHECK(DecodeNicAddresses(EncodeNicAddresses(kAddresses), &decoded).ok());
  CHECK(decoded == kAddresses);
  const std::vector<NicAddress> most(kMaxNics, NicAddress(kMaxNicAddressBytes, 1));
  CHECK(DecodeNicAddresses(EncodeNicAddresses(most), &decoded).ok());
  CHECK(decoded == most);
}

void AnyPartAndAnyMoreAreMalformed() {
  const std::vector<uint8_t> blob = EncodeNicAddresses(kAddresses);
  std::vector<NicAddress> decoded;
  for (size_t num_bytes = 0; num_bytes < blob.size(); ++num_bytes) {
    CHECK(!DecodeNicAddresses(std::span(blob).first(num_bytes), &decoded).ok());
  }
  std::vector<uint8_t> longer = blob;
  longer.push_back(0);
  CHECK(!DecodeNicAddresses(longer, &decoded).ok());
  CHECK(decoded.empty());
}

void AnyByteChangedNeverReadsBeyondTheEnd() {
  const std::vector<uint8_t> blob = EncodeNicAddresses({{{1, 2, 3}, {4, 5}}});
  for (size_t at = 0; at < blob.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      std::vector<uint8_t> changed = blob;
      changed[at] = static_cast<uint8_t>(value);
      std::vector<NicAddress> decoded;
      const bool is_content = at >= 7 && at != 10 && at != 11;
      CHECK(DecodeNicAddresses(changed, &decoded).ok() == (is_content || changed == blob));
    }
  }
}

void NumbersBeyondTheBoundsAreMalformed() {
  std::vector<NicAddress> decoded;
  CHECK(!DecodeNicAddresses(EncodeNicAddresses({}), &decoded).ok());
  CHECK(!DecodeNicAddresses(EncodeNicAddresses({{{1}, {}}}), &decoded).ok());
  const std::vector<NicAddress> too_many(kMaxNics + 1, NicAddress{1});
  CHECK(!DecodeNicAddresses(EncodeNicAddresses(too_many), &decoded).ok());
  const std::vector<NicAddress> too_long = {NicAddress(kMaxNicAddressBytes + 1, 1)};
  CHECK(!DecodeNicAddresses(EncodeNicAddresses(too_long), &decoded).ok());
}

struct InfoFreer {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};

void DomainsAreFoundByTheirNameWithoutItsEnding() {
  std::unique_ptr<fi_info, InfoFreer> infos;
  for (const char* name : {"rdmap160s27-dgrm", "rdmap160s27-rdm", "rdmap16s2-rdm", "rdmap16s27-rdm"}) {
    fi_info* info = fi_allocinfo();
    info->domain_attr->name = strdup(name);
    info->next = infos.release();
    infos.reset(info);
  }
  CHECK(std::strcmp(FindDomain(infos.get(), "rdmap16s27")->domain_attr->name, "rdmap16s27-rdm") == 0);
  CHECK(std::strcmp(FindDomain(infos.get(), "rdmap16s2")->domain_attr->name, "rdmap16s2-rdm") == 0);
  CHECK(std::strcmp(FindDomain(infos.get(), "rdmap160s27-dgrm")->domain_attr->name, "rdmap160s27-dgrm") == 0);
  CHECK(FindDomain(infos.get(), "rdmap16") == nullptr);
  CHECK(FindDomain(infos.get(), "127.0.0.1") == nullptr);
  CHECK(FindDomain(nullptr, "rdmap16s27") == nullptr);
}

}  // namespace
}  // namespace pdserve::fabric

int main() {
  using namespace pdserve::fabric;
  RUN(DomainsAreFoundByTheirNameWithoutItsEnding);
  RUN(DecodingGivesWhatWasEncoded);
  RUN(AnyPartAndAnyMoreAreMalformed);
  RUN(AnyByteChangedNeverReadsBeyondTheEnd);
  RUN(NumbersBeyondTheBoundsAreMalformed);
}
