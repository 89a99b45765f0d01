# Installs the build, then configures, builds and runs the consumer against the install tree.
set(work ${BELFRY_BUILD}/consumer)
set(prefix ${work}/prefix)
file(REMOVE_RECURSE ${work})

function(step)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(result)
    list(JOIN ARGN " " line)
    message(FATAL_ERROR "failed (${result}): ${line}")
  endif()
endfunction()

step(${CMAKE_COMMAND} --install ${BELFRY_BUILD} --prefix ${prefix})

file(GLOB_RECURSE headers RELATIVE ${prefix}/include ${prefix}/include/*.hpp)
list(SORT headers)
set(every_header "#pragma once\n")
foreach(header ${headers})
  string(APPEND every_header "#include \"${header}\"\n")
endforeach()
file(WRITE ${work}/include/every_header.hpp ${every_header})

step(${CMAKE_COMMAND} -S ${SOURCE} -B ${work}/build -G ${GENERATOR} -D VERSION=${VERSION}
     -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_PREFIX_PATH=${prefix}
     -D CMAKE_CXX_FLAGS=-I${work}/include)
step(${CMAKE_COMMAND} --build ${work}/build)
step(${work}/build/consumer)
