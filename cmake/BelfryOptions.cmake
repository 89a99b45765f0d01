# Compile options that every target of belfry shares, and how a test program is declared.

# ccache where it is installed. The environment lets it serve objects that were built through a
# precompiled header, and serve one checkout what another one compiled.
find_program(CCACHE ccache)
if(CCACHE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${CCACHE})
endif()

# Sanitizers concern every object of the build, so they are set for the whole tree and not
# handed on to consumers of the installed library.
if(BELFRY_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(BELFRY_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(NOT BELFRY_SANITIZE STREQUAL "")
  message(FATAL_ERROR "BELFRY_SANITIZE is '${BELFRY_SANITIZE}'; give 'address', 'thread' or nothing")
endif()

if(BELFRY_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "BELFRY_FUZZ is ON and the compiler is ${CMAKE_CXX_COMPILER_ID}; libFuzzer "
                        "comes with clang: use --preset fuzz, or CMAKE_CXX_COMPILER=clang++-14")
  endif()
  # The library's own branches guide the fuzzer; each program links the driver itself.
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

function(belfry_compile_options target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # -fpch-preprocess: ccache may serve objects built through a precompiled header only with it.
    # g++ 12 sees overruns in moves of std::string that are not there (-O2 and up).
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Wno-interference-size -Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread -fpch-preprocess>)
  else()
    # The same for clang: its precompiled headers must not hold the time of their making.
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>)
  endif()
  if(BELFRY_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
endfunction()

# belfry_unity(target): where BELFRY_UNITY is ON, each folder's sources are one source to the
# compiler, which then reads the headers once. For builds that are made whole and seldom; the
# release build compiles each source by itself, and so finds a header that it forgot. Call it in
# the directory that made the target.
function(belfry_unity target)
  if(NOT BELFRY_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} OUTPUT_VARIABLE path)
    cmake_path(GET path PARENT_PATH folder)
    cmake_path(GET folder FILENAME folder)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${folder})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
    UNITY_BUILD_CODE_BEFORE_INCLUDE "// NOLINTNEXTLINE(bugprone-suspicious-include)")
  # A class of a .cpp may hold what that file's anonymous namespace declares; g++ takes the .cpp for
  # a header here. The release build looks at each file as it is.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# belfry_test(name [SLOW] [SERIAL] [SEEDED] [NO_ASAN] [NO_TSAN] [TIMEOUT seconds] sources...)
# A GoogleTest program that may include the private headers of src/. One CTest entry a program.
#   SLOW     labelled `slow`, so that a quick run can leave it out (ctest -LE slow)
#   SERIAL   runs alone: it measures time, or needs every core
#   SEEDED   labelled `seeded`: `./dev soak` runs it again and again with BELFRY_FIRST_SEED and
#            BELFRY_SEEDS (how many) in its environment
#   NO_ASAN, NO_TSAN   labelled so, and left out of that sanitizer's run
function(belfry_test name)
  cmake_parse_arguments(arg "SLOW;SERIAL;SEEDED;NO_ASAN;NO_TSAN" "TIMEOUT" "" ${ARGN})
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE belfry GTest::gtest GTest::gtest_main fmt::fmt nlohmann_json::nlohmann_json)
  if(TARGET belfry_test_pch AND NOT name STREQUAL belfry_test_pch)
    target_precompile_headers(${name} REUSE_FROM belfry_test_pch)
  endif()
  belfry_compile_options(${name})
  add_test(NAME ${name} COMMAND ${name})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  set(labels "")
  foreach(flag SLOW SEEDED NO_ASAN NO_TSAN)
    if(arg_${flag})
      string(TOLOWER ${flag} label)
      string(REPLACE "_" "-" label ${label})
      list(APPEND labels ${label})
    endif()
  endforeach()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${arg_TIMEOUT} LABELS "${labels}")
  if(arg_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
  if(BELFRY_SANITIZE STREQUAL "thread")
    set_tests_properties(${name} PROPERTIES ENVIRONMENT
      "BELFRY_SIMT_MODE=threads;TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1")
  elseif(BELFRY_SANITIZE STREQUAL "address")
    set_tests_properties(${name} PROPERTIES ENVIRONMENT "UBSAN_OPTIONS=print_stacktrace=1")
  endif()
endfunction()
