# Device code by nvcc. Objects are made by plain custom commands, not by CMake's CUDA language: what
# ptxas reports is checked, for each architecture.
# Nothing here needs a GPU.
set(BELFRY_CUDA_ARCHITECTURES 80 90a CACHE STRING "the sm_ numbers that device code is compiled for")
option(BELFRY_CUDA_FAST_COMPILE
  "the kernels of the command take a third of the time to compile and are slow: for builds that nobody runs" OFF)

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
if(BELFRY_CUDA_ENABLED)
  # The toolkit of that nvcc and no other.
  cmake_path(GET BELFRY_NVCC PARENT_PATH bin)
  cmake_path(GET bin PARENT_PATH toolkit)
  set(CUDAToolkit_ROOT ${toolkit} CACHE PATH "the CUDA toolkit of BELFRY_NVCC")
  find_package(CUDAToolkit REQUIRED)
  # For kernels that nobody runs.
  set(belfry_fastest "-Xcicc=-O1;-Xptxas=-O1")
  if(CUDAToolkit_VERSION VERSION_GREATER_EQUAL 13)
    set(belfry_fastest --Ofast-compile=min)
  endif()
endif()

# What every nvcc line has in common, and the check of what ptxas says.
function(belfry_nvcc out)
  set(host_compiler "")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(host_compiler -ccbin=${CMAKE_CXX_COMPILER})
  endif()
  set(${out} ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/check_ptxas.py --
    ${CMAKE_CXX_COMPILER_LAUNCHER} ${BELFRY_NVCC} -std=c++20 -O3 -lineinfo ${host_compiler}
    -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/tests
    -Werror=cross-execution-space-call,deprecated-declarations,reorder
    -Xcompiler=-Wall,-Wextra,-Werror -Xptxas=-v,-warn-spills,-warn-lmem-usage PARENT_SCOPE)
endfunction()

# belfry_cuda_object(out source [options...]): one object with code for every architecture, one
# after the other: of ptxas at work for two at once, the lines that are checked could mix.
function(belfry_cuda_object out source)
  belfry_nvcc(nvcc)
  set(code "")
  foreach(arch ${BELFRY_CUDA_ARCHITECTURES})
    list(APPEND code -gencode=arch=compute_${arch},code=sm_${arch})
  endforeach()
  cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
  cmake_path(GET source STEM name)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${name}.cu.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${nvcc} -c ${source} -o ${object} ${code} ${ARGN}
            -MD -MF ${object}.d -MT ${object}
    DEPENDS ${source} ${PROJECT_SOURCE_DIR}/cmake/check_ptxas.py
    DEPFILE ${object}.d
    COMMENT "nvcc ${name}.cu"
    COMMAND_EXPAND_LISTS VERBATIM)
  set(${out} ${object} PARENT_SCOPE)
endfunction()

# belfry_cuda_sources(target sources.cu...): adds each source to a target that runs. The library's
# are always compiled in full, and so checked as what users run.
function(belfry_cuda_sources target)
  set(fast "")
  if(BELFRY_CUDA_FAST_COMPILE AND NOT target STREQUAL "belfry")
    set(fast ${belfry_fastest})
  endif()
  foreach(source ${ARGN})
    belfry_cuda_object(object ${source} ${fast} -Xcompiler=-fPIC)
    target_sources(${target} PRIVATE ${object})
  endforeach()
  target_link_libraries(${target} PRIVATE CUDA::cudart_static)
endfunction()

# belfry_cuda_objects(target sources.cu...): compiles each source as part of `target`, with its
# COMPILE_OPTIONS. The build fails when ptxas ignored setmaxnreg, when something spills, or when a
# kernel whose name begins with `hot_` uses local memory; see check_ptxas.py.
function(belfry_cuda_objects target)
  set(objects "")
  foreach(source ${ARGN})
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    if(NOT options)
      set(options "")
    endif()
    belfry_cuda_object(object ${source} ${options})
    list(APPEND objects ${object})
  endforeach()
  add_custom_target(${target} DEPENDS ${objects})
endfunction()
