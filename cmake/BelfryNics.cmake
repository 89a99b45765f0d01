# The libraries of NICs, each optional: without one its provider is left out, and says so. So is
# hwloc, which knows the NIC nearest a GPU.
# BELFRY_FABRIC, BELFRY_VERBS and BELFRY_HWLOC: ON (missing is an error), OFF, or AUTO.
set(BELFRY_FABRIC "AUTO" CACHE STRING "ON, OFF or AUTO: provider fabric, where libfabric is found")
set(BELFRY_VERBS "AUTO" CACHE STRING "ON, OFF or AUTO: providers verbs and mlx5, where rdma-core is found")
set(BELFRY_HWLOC "AUTO" CACHE STRING "ON, OFF or AUTO: distances between GPUs and NICs, where hwloc is found")

# belfry_nic_library(OPTION library header package loss): sets OPTION_ENABLED. `loss` is what
# befalls the build without it.
function(belfry_nic_library option library header package loss)
  set(${option}_ENABLED OFF PARENT_SCOPE)
  if(NOT ${option})
    return()
  endif()
  find_library(${option}_LIBRARY ${library})
  find_path(${option}_INCLUDE_DIR ${header})
  set(lacking "")
  if(NOT ${option}_LIBRARY OR NOT ${option}_INCLUDE_DIR)
    set(lacking "${header} or lib${library} not found")
  elseif(library STREQUAL "fabric")
    file(STRINGS ${${option}_INCLUDE_DIR}/${header} version REGEX "define FI_(MAJOR|MINOR)_VERSION")
    string(REGEX REPLACE "[^0-9;]+" "" version "${version}")
    string(REPLACE ";" "." version "${version}")
    if(version VERSION_LESS 1.17)
      set(lacking "libfabric is ${version}, 1.17 is needed")
    endif()
  elseif(library STREQUAL "hwloc")
    file(STRINGS ${${option}_INCLUDE_DIR}/${header} new REGEX "HWLOC_TOPOLOGY_FLAG_DONT_CHANGE_BINDING")
    if(NOT new)
      set(lacking "hwloc is older than 2.5")
    endif()
  endif()
  if(lacking STREQUAL "")
    set(${option}_ENABLED ON PARENT_SCOPE)
  elseif("${${option}}" STREQUAL "AUTO")
    message(STATUS "${lacking} (Debian: ${package}): ${loss}")
  else()
    message(FATAL_ERROR "${option} is ${${option}}, but ${lacking}; install ${package}, or set it to OFF")
  endif()
endfunction()

belfry_nic_library(BELFRY_FABRIC fabric rdma/fabric.h libfabric-dev "a provider is left out")
belfry_nic_library(BELFRY_VERBS ibverbs infiniband/verbs.h libibverbs-dev "a provider is left out")
belfry_nic_library(BELFRY_HWLOC hwloc hwloc.h libhwloc-dev "the NIC nearest a GPU will not be known")

# libmlx5, of the same package: provider mlx5. Its header alone is what SoftNIC's front end needs.
find_path(BELFRY_MLX5DV_INCLUDE infiniband/mlx5dv.h)
find_library(BELFRY_MLX5_LIBRARY mlx5)
set(BELFRY_MLX5_ENABLED OFF)
if(BELFRY_VERBS_ENABLED AND BELFRY_MLX5DV_INCLUDE AND BELFRY_MLX5_LIBRARY)
  set(BELFRY_MLX5_ENABLED ON)
else()
  message(STATUS "provider mlx5 will refuse: BELFRY_VERBS is OFF, or libmlx5 or infiniband/mlx5dv.h "
                 "was not found (Debian: libibverbs-dev)")
endif()

# libefa, of the same package: SRD queue pairs of provider verbs.
find_path(BELFRY_EFADV_INCLUDE infiniband/efadv.h)
find_library(BELFRY_EFA_LIBRARY efa)
set(BELFRY_EFA_ENABLED OFF)
if(BELFRY_VERBS_ENABLED AND BELFRY_EFADV_INCLUDE AND BELFRY_EFA_LIBRARY)
  set(BELFRY_EFA_ENABLED ON)
elseif(BELFRY_VERBS_ENABLED)
  message(STATUS "provider verbs will refuse EFA devices: libefa or infiniband/efadv.h was not found "
                 "(Debian: libibverbs-dev)")
endif()
