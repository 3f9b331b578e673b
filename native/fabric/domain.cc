#include "fabric/domain.h"

#include <netinet/in.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "fabric/saved_signal_handlers.h"

namespace pdserve::fabric {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 17);

// Room for the immediates that arrive while the worker thread does something else: 32 peers with full windows and some.
constexpr size_t kCompletionQueueEntries = 8192;

constexpr size_t kCompletionBatch = 64;

// Keys are random, so that one kept from an earlier incarnation at this address opens nothing.
uint64_t RandomKey(size_t key_bytes) {
  uint64_t key = 0;
  if (getrandom(&key, std::min(key_bytes, sizeof(key)), 0) < 0) key = reinterpret_cast<uintptr_t>(&key);
  return key;
}

Completion FromEntry(const fi_cq_data_entry& entry) {
  // tcp 1.17 marks arrivals with FI_REMOTE_CQ_DATA only: no FI_RMA, no length.
  if (entry.flags & FI_REMOTE_CQ_DATA) {
    return {.kind = Completion::Kind::kImmediate, .immediate = static_cast<uint32_t>(entry.data)};
  }
  if (entry.op_context == nullptr) return {.kind = Completion::Kind::kUnattributed};
  return {.kind = Completion::Kind::kWriteEnded, .context = entry.op_context};
}

Completion ReadError(fid_cq* queue) {
  fi_cq_err_entry entry = {};
  if (fi_cq_readerr(queue, &entry, 0) != 1) return {.kind = Completion::Kind::kUnattributed};
  const int error = entry.err != 0 ? entry.err : FI_EIO;
  if (entry.op_context == nullptr) return {.kind = Completion::Kind::kUnattributed, .error = error};
  return {.kind = Completion::Kind::kWriteEnded, .context = entry.op_context, .error = error};
}

}  // namespace

const fi_info* FindDomain(const fi_info* infos, std::string_view name) {
  for (const fi_info* info = infos; info != nullptr; info = info->next) {
    const std::string_view domain = info->domain_attr->name;
    if (domain == name || (domain.starts_with(name) && domain[name.size()] == '-')) return info;
  }
  return nullptr;
}

Status Domain::Open(const Provider& provider, const std::string& bind_host, bool device_memory,
                    std::unique_ptr<Domain>* domain) {
  std::unique_ptr<Domain> opened(new Domain(provider));
  if (Status status = opened->GetInfo(bind_host, device_memory); !status.ok()) return status;
  if (Status status = opened->OpenObjects(); !status.ok()) return status;
  if (Status status = opened->ReadAddress(); !status.ok()) return status;
  *domain = std::move(opened);
  return Status::Ok();
}

Status Domain::GetInfo(const std::string& bind_host, bool device_memory) {
  std::unique_ptr<fi_info, InfoFreer> hints(fi_allocinfo());
  if (!hints) return Status::Failed("fi_allocinfo", ENOMEM);
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->fabric_attr->prov_name = strdup(provider_.libfabric_name);
  if (device_memory) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }

  if (int result = FindInfo(hints.get(), bind_host); result != 0) {
    hints->caps &= ~FI_HMEM;
    const bool would_do_without = device_memory && FindInfo(hints.get(), bind_host) == 0;
    return Status::Failed("fi_getinfo", -result, would_do_without ? DeviceMemoryAdvice(provider_) : provider_.advice);
  }
  if (provider_.bind_host != BindHost::kName || bind_host.empty()) return Status::Ok();
  const fi_info* named = FindDomain(info_.get(), bind_host);
  if (named == nullptr) return Status::Invalid("open", "no NIC is called '" + bind_host + "'; " + provider_.advice);
  info_.reset(fi_dupinfo(named));
  return info_ ? Status::Ok() : Status::Failed("fi_dupinfo", ENOMEM);
}

int Domain::FindInfo(fi_info* hints, const std::string& bind_host) {
  const bool bound = provider_.bind_host == BindHost::kAddress && !bind_host.empty();
  fi_info* found = nullptr;
  int result = 0;
  // Order must be asked for to be promised; a provider without it is taken too.
  for (const uint64_t order : {uint64_t{FI_ORDER_RMA_WAW}, uint64_t{FI_ORDER_NONE}}) {
    hints->tx_attr->msg_order = order;
    hints->rx_attr->msg_order = order;
    reorders_writes_ = order == FI_ORDER_NONE;
    result =
        fi_getinfo(kApiVersion, bound ? bind_host.c_str() : nullptr, nullptr, bound ? FI_SOURCE : 0, hints, &found);
    if (result != -FI_ENODATA) break;
  }
  if (result == 0) info_.reset(found);
  return result;
}

Status Domain::OpenObjects() {
  fid_fabric* fabric = nullptr;
  if (int result = fi_fabric(info_->fabric_attr, &fabric, nullptr); result != 0) {
    return Status::Failed("fi_fabric", -result, provider_.advice);
  }
  fabric_.reset(fabric);

  fid_domain* domain = nullptr;
  if (int result = fi_domain(fabric_.get(), info_.get(), &domain, nullptr); result != 0) {
    return Status::Failed("fi_domain", -result, provider_.advice);
  }
  domain_.reset(domain);

  return OpenEndpoint(&endpoints_.emplace_back());
}

Status Domain::OpenCompletionQueue(Endpoint* opened) {
  fi_cq_attr attr = {};
  attr.size = kCompletionQueueEntries;
  attr.format = FI_CQ_FORMAT_DATA;
  attr.wait_obj = provider_.has_wait_fd ? FI_WAIT_FD : FI_WAIT_NONE;
  fid_cq* completion_queue = nullptr;
  if (int result = fi_cq_open(domain_.get(), &attr, &completion_queue, nullptr); result != 0) {
    return Status::Failed("fi_cq_open", -result);
  }
  opened->completion_queue.reset(completion_queue);
  if (!provider_.has_wait_fd) return Status::Ok();
  const int result = fi_control(&completion_queue->fid, FI_GETWAIT, &opened->wait_fd);
  return result == 0 ? Status::Ok() : Status::Failed("fi_control(FI_GETWAIT)", -result);
}

Status Domain::OpenEndpoint(Endpoint* opened) {
  const SavedSignalHandlers saved_signal_handlers;
  fi_av_attr av_attr = {};
  av_attr.type = FI_AV_TABLE;
  fid_av* address_vector = nullptr;
  if (int result = fi_av_open(domain_.get(), &av_attr, &address_vector, nullptr); result != 0) {
    return Status::Failed("fi_av_open", -result);
  }
  opened->address_vector.reset(address_vector);
  if (Status status = OpenCompletionQueue(opened); !status.ok()) return status;

  fid_ep* endpoint = nullptr;
  if (int result = fi_endpoint(domain_.get(), info_.get(), &endpoint, nullptr); result != 0) {
    return Status::Failed("fi_endpoint", -result, provider_.advice);
  }
  opened->endpoint.reset(endpoint);
  if (int result = fi_ep_bind(endpoint, &address_vector->fid, 0); result != 0) {
    return Status::Failed("fi_ep_bind", -result);
  }
  if (int result = fi_ep_bind(endpoint, &opened->completion_queue->fid, FI_TRANSMIT | FI_RECV); result != 0) {
    return Status::Failed("fi_ep_bind", -result);
  }
  if (int result = fi_enable(endpoint); result != 0) return Status::Failed("fi_enable", -result, provider_.advice);
  return Status::Ok();
}

Status Domain::ReadAddress() {
  size_t num_bytes = 0;
  fid* endpoint = &endpoints_.front().endpoint->fid;
  fi_getname(endpoint, nullptr, &num_bytes);
  address_.resize(num_bytes);
  if (int result = fi_getname(endpoint, address_.data(), &num_bytes); result != 0) {
    return Status::Failed("fi_getname", -result);
  }
  address_.resize(num_bytes);
  return Status::Ok();
}

bool Domain::NeedsDescriptor(const Memory& source) const {
  // A provider that does not insist (FI_MR_HMEM) takes bytes without a descriptor for the host's, and may read them.
  return source.cuda_device.has_value() || (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
}

Status Domain::Register(const Memory& memory, uint64_t access, Registration* registration) {
  const uint64_t mr_mode = info_->domain_attr->mr_mode;
  const iovec range = {memory.address, memory.num_bytes};
  fi_mr_attr attr = {};
  attr.mr_iov = &range;
  attr.iov_count = 1;
  attr.access = access;
  attr.iface = memory.cuda_device ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  if (memory.cuda_device) attr.device.cuda = *memory.cuda_device;
  // A random key collides with a live one about never; a second collision is taken for another error.
  for (int attempt = 0; attempt < 2; ++attempt) {
    attr.requested_key = RandomKey(info_->domain_attr->mr_key_size);
    fid_mr* mr = nullptr;
    const int result = fi_mr_regattr(domain_.get(), &attr, 0, &mr);
    if (result == -FI_ENOKEY) continue;
    if (result != 0) {
      return Status::Failed("fi_mr_regattr", -result,
                            memory.cuda_device ? DeviceMemoryAdvice(provider_)
                                               : "on a NIC, raise the locked memory limit (ulimit -l unlimited)");
    }
    registration->mr.reset(mr);
    registration->base = (mr_mode & FI_MR_VIRT_ADDR) ? reinterpret_cast<uintptr_t>(memory.address) : 0;
    registration->key = fi_mr_key(mr);
    return Status::Ok();
  }
  return Status::Failed("fi_mr_regattr", FI_ENOKEY);
}

Status Domain::CheckAddress(std::span<const uint8_t> address) const {
  switch (info_->addr_format) {
    case FI_SOCKADDR_IN: {
      sockaddr_in socket_address;
      if (address.size() != sizeof(socket_address)) break;
      std::memcpy(&socket_address, address.data(), sizeof(socket_address));
      if (socket_address.sin_family != AF_INET || socket_address.sin_port == 0) break;
      return Status::Ok();
    }
    case FI_ADDR_STR:
      if (address.empty() || address.size() > FI_NAME_MAX || address.back() != 0) break;
      return Status::Ok();
    default:
      if (address.size() != address_.size()) break;
      return Status::Ok();
  }
  return Status::Invalid("connect", "the peer's address is malformed; both sides must use the same provider");
}

Status Domain::InsertPeer(std::span<const uint8_t> address, PeerRoute* route) {
  if (Status status = CheckAddress(address); !status.ok()) return status;
  if (provider_.endpoint_per_peer) {
    Endpoint own;
    if (Status status = OpenEndpoint(&own); !status.ok()) return status;
    endpoints_.push_back(std::move(own));
  }
  const Endpoint& used = endpoints_.back();
  fi_addr_t peer = FI_ADDR_UNSPEC;
  const int num_inserted = fi_av_insert(used.address_vector.get(), address.data(), 1, &peer, 0, nullptr);
  if (num_inserted != 1) {
    if (provider_.endpoint_per_peer) endpoints_.pop_back();
    return Status::Failed("fi_av_insert", num_inserted < 0 ? -num_inserted : FI_EINVAL,
                          "the peer must use the same provider, and shm needs it alive on this machine");
  }
  route->endpoint = used.endpoint.get();
  route->address = peer;
  return Status::Ok();
}

void Domain::RemovePeer(const PeerRoute& route) {
  if (provider_.endpoint_per_peer) {
    std::erase_if(endpoints_, [&](const Endpoint& own) { return own.endpoint.get() == route.endpoint; });
  } else {
    fi_addr_t peer = route.address;
    fi_av_remove(endpoints_.front().address_vector.get(), &peer, 1, 0);
  }
}

int Domain::Write(const WriteRequest& request) {
  iovec local = {const_cast<char*>(request.piece.source), request.piece.num_bytes};
  void* descriptor = request.piece.source_descriptor;
  fi_rma_iov remote = {request.piece.target_address, request.piece.num_bytes, request.piece.target_key};
  fi_msg_rma message = {};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = request.route.address;
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = request.context;
  message.data = request.immediate;
  uint64_t flags = FI_COMPLETION;
  if (request.has_immediate) flags |= FI_REMOTE_CQ_DATA;
  // In tx_attr.op_flags it would do nothing for fi_writemsg (tcp 1.17).
  if (request.delivery_complete) flags |= FI_DELIVERY_COMPLETE;
  return static_cast<int>(-fi_writemsg(request.route.endpoint, &message, flags));
}

size_t Domain::ReadCompletions(std::span<Completion> completions) {
  size_t num_read = 0;
  for (const Endpoint& endpoint : endpoints_) {
    if (num_read == completions.size()) break;
    num_read += ReadQueue(endpoint.completion_queue.get(), completions.subspan(num_read));
  }
  return num_read;
}

size_t Domain::ReadQueue(fid_cq* queue, std::span<Completion> completions) {
  std::array<fi_cq_data_entry, kCompletionBatch> entries;
  const size_t capacity = std::min(entries.size(), completions.size());
  const ssize_t num_read = fi_cq_read(queue, entries.data(), capacity);
  if (num_read == -FI_EAVAIL) {
    completions[0] = ReadError(queue);
    return 1;
  }
  if (num_read <= 0) return 0;
  std::transform(entries.begin(), entries.begin() + num_read, completions.begin(), FromEntry);
  return static_cast<size_t>(num_read);
}

void Domain::AppendWaitFds(std::vector<int>* fds) const {
  if (!provider_.has_wait_fd) return;
  for (const Endpoint& endpoint : endpoints_) fds->push_back(endpoint.wait_fd);
}

bool Domain::PrepareToWait() {
  std::vector<fid*> waited;
  for (const Endpoint& endpoint : endpoints_) waited.push_back(&endpoint.completion_queue->fid);
  return fi_trywait(fabric_.get(), waited.data(), static_cast<int>(waited.size())) == FI_SUCCESS;
}

}  // namespace pdserve::fabric
