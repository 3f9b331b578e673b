# The fabric without Python: for the module, and for the native tests.
find_package(PkgConfig REQUIRED)
pkg_check_modules(LIBFABRIC REQUIRED IMPORTED_TARGET libfabric>=1.17)

add_library(pdserve_fabric STATIC
  ${CMAKE_CURRENT_LIST_DIR}/data_plane.cc
  ${CMAKE_CURRENT_LIST_DIR}/domain.cc
  ${CMAKE_CURRENT_LIST_DIR}/domain_group.cc
  ${CMAKE_CURRENT_LIST_DIR}/engine.cc
  ${CMAKE_CURRENT_LIST_DIR}/immediate_table.cc
  ${CMAKE_CURRENT_LIST_DIR}/layer_watcher.cc
  ${CMAKE_CURRENT_LIST_DIR}/nic_addresses.cc
  ${CMAKE_CURRENT_LIST_DIR}/page_push.cc
  ${CMAKE_CURRENT_LIST_DIR}/provider.cc
  ${CMAKE_CURRENT_LIST_DIR}/region.cc
  ${CMAKE_CURRENT_LIST_DIR}/sender.cc
  ${CMAKE_CURRENT_LIST_DIR}/shm_files.cc
  ${CMAKE_CURRENT_LIST_DIR}/status.cc
  ${CMAKE_CURRENT_LIST_DIR}/worker.cc)
pdserve_strict(pdserve_fabric)
target_link_libraries(pdserve_fabric PUBLIC PkgConfig::LIBFABRIC Threads::Threads)
