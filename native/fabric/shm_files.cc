#include "fabric/shm_files.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

namespace pdserve::fabric {

void RemoveShmFilesOfDeadProcesses(const std::filesystem::path& directory) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string name = entry.path().filename();
    pid_t pid = 0;
    unsigned uid = 0;
    unsigned endpoint = 0;
    int num_matched = 0;
    if (std::sscanf(name.c_str(), "%d:%u:%u%n", &pid, &uid, &endpoint, &num_matched) != 3) continue;
    if (static_cast<size_t>(num_matched) != name.size() || pid <= 0 || uid != geteuid()) continue;
    if (kill(pid, 0) == 0 || errno != ESRCH) continue;
    std::filesystem::remove(entry.path(), ignored);
  }
}

}  // namespace pdserve::fabric
