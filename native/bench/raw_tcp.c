// How fast one TCP stream over loopback moves pages between two processes: one send and one receive a page.

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/page_run.h"

static void SetNoDelay(int fd) {
  const int enabled = 1;
  if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &enabled, sizeof(enabled)) != 0) Fail("setsockopt");
}

static void SendAll(int fd, const char* bytes, size_t num_bytes) {
  while (num_bytes > 0) {
    const ssize_t num_sent = send(fd, bytes, num_bytes, MSG_NOSIGNAL);
    if (num_sent < 0) Fail("send");
    bytes += num_sent;
    num_bytes -= (size_t)num_sent;
  }
}

static void ReceiveAll(int fd, char* bytes, size_t num_bytes) {
  while (num_bytes > 0) {
    const ssize_t num_received = recv(fd, bytes, num_bytes, MSG_WAITALL);
    if (num_received < 0) Fail("recv");
    if (num_received == 0) {
      fprintf(stderr, "the other side is gone\n");
      exit(1);
    }
    bytes += num_received;
    num_bytes -= (size_t)num_received;
  }
}

static void Receive(const PageRun* run, struct sockaddr_in address) {
  char* region = MapRegion(run, 0);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof(address)) != 0) Fail("connect");
  SetNoDelay(fd);
  char token = 1;
  SendAll(fd, &token, 1);
  for (size_t round = 0; round < run->num_rounds; ++round) {
    for (size_t i = 0; i < run->num_pages; ++i) ReceiveAll(fd, region + PageOffset(run, i), run->page_bytes);
  }
  SendAll(fd, &token, 1);
  close(fd);
}

static int64_t Send(const PageRun* run, const char* region, int fd) {
  char token;
  ReceiveAll(fd, &token, 1);
  const int64_t start_ns = MonotonicNs();
  for (size_t round = 0; round < run->num_rounds; ++round) {
    for (size_t i = 0; i < run->num_pages; ++i) SendAll(fd, region + PageOffset(run, i), run->page_bytes);
  }
  ReceiveAll(fd, &token, 1);
  return MonotonicNs() - start_ns;
}

int main(int argc, char** argv) {
  const PageRun run = ParsePageRun(argc, argv);
  const char* region = MapRegion(&run, 1);

  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t address_bytes = sizeof(address);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (listener < 0 || bind(listener, (struct sockaddr*)&address, address_bytes) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, (struct sockaddr*)&address, &address_bytes) != 0) {
    Fail("listen");
  }
  const pid_t receiver = fork();
  if (receiver < 0) Fail("fork");
  if (receiver == 0) {
    close(listener);
    Receive(&run, address);
    return 0;
  }
  const int fd = accept(listener, NULL, NULL);
  if (fd < 0) Fail("accept");
  SetNoDelay(fd);
  const int64_t elapsed_ns = Send(&run, region, fd);
  int status;
  if (waitpid(receiver, &status, 0) != receiver || status != 0) {
    fprintf(stderr, "the receiver failed\n");
    return 1;
  }
  PrintResult(&run, "raw_tcp", elapsed_ns);
  return 0;
}
