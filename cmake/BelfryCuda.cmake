# Device code by nvcc. Objects are made by plain custom commands, not by CMake's CUDA language:
# each source is compiled for each architecture on its own and what ptxas reports is checked.
# Nothing here needs a GPU.
set(BELFRY_CUDA_ARCHITECTURES 80 90a CACHE STRING "the sm_ numbers that device code is compiled for")

set(BELFRY_CUDA_ENABLED OFF)
if(NOT BELFRY_CUDA MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "BELFRY_CUDA is '${BELFRY_CUDA}'; give ON, OFF or AUTO")
elseif(NOT BELFRY_CUDA STREQUAL "OFF")
  find_program(BELFRY_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  if(BELFRY_NVCC)
    set(BELFRY_CUDA_ENABLED ON)
  elseif(BELFRY_CUDA STREQUAL "ON")
    message(FATAL_ERROR "BELFRY_CUDA is ON and nvcc was not found in PATH, CUDA_HOME or "
                        "/usr/local/cuda; install the CUDA toolkit (12.4 or later), set CUDA_HOME, "
                        "or give BELFRY_CUDA=AUTO")
  endif()
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
endif()

# belfry_cuda_objects(target sources.cu...): compiles each source for every architecture as part
# of `target`. The build fails when ptxas ignored setmaxnreg, or when a kernel whose name begins
# with `hot_` spills or uses local memory; see check_ptxas.py.
function(belfry_cuda_objects target)
  set(host_compiler "")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(host_compiler -ccbin=${CMAKE_CXX_COMPILER})
  endif()
  set(objects "")
  foreach(source ${ARGN})
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    cmake_path(GET source STEM name)
    foreach(arch ${BELFRY_CUDA_ARCHITECTURES})
      set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}.sm_${arch}.o)
      add_custom_command(OUTPUT ${object}
        COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/check_ptxas.py --
                ${CMAKE_CXX_COMPILER_LAUNCHER} ${BELFRY_NVCC} -c ${source} -o ${object}
                -std=c++20 -O3 -lineinfo -gencode=arch=compute_${arch},code=sm_${arch}
                ${host_compiler}
                -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src
                -Werror=cross-execution-space-call,deprecated-declarations,reorder
                -Xcompiler=-Wall,-Wextra,-Werror
                -Xptxas=-v,-warn-spills,-warn-lmem-usage
                -MD -MF ${object}.d -MT ${object}
        DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/check_ptxas.py
        DEPFILE ${object}.d
        COMMENT "nvcc ${name}.cu for sm_${arch}"
        COMMAND_EXPAND_LISTS VERBATIM)
      list(APPEND objects ${object})
    endforeach()
  endforeach()
  add_custom_target(${target} DEPENDS ${objects})
endfunction()
