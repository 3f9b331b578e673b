// What libfabric's shm provider leaves in /dev/shm when a process is killed: 13 to 17 MB for each endpoint.

#ifndef PDSERVE_FABRIC_SHM_FILES_H_
#define PDSERVE_FABRIC_SHM_FILES_H_

#include <filesystem>

namespace pdserve::fabric {

// Removes the endpoint files ("pid:uid:endpoint") of this user whose process does not exist.
// REQUIRES: /dev/shm is not shared with another PID namespace that runs pdserve as the same user.
void RemoveShmFilesOfDeadProcesses(const std::filesystem::path& directory = "/dev/shm");

}  // namespace pdserve::fabric

#endif  // PDSERVE_FABRIC_SHM_FILES_H_
