# Compile options that every target of belfry shares, and how a test program is declared.

# ccache where it is installed. The environment lets it serve objects that were built through a
# precompiled header, and serve one checkout what another one compiled. What it has not it need not
# preprocess first: ninja asks the compiler for the list of headers anyway.
find_program(CCACHE ccache)
if(CCACHE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_COMPILER_LAUNCHER
    ${CMAKE_COMMAND} -E env
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
    CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1 ${CCACHE})
endif()

if(NOT BELFRY_SANITIZE STREQUAL "")
  # Checked code is long: device calls are compiled once, not in each place.
  add_compile_definitions(BELFRY_OUTLINE_CALLS)
endif()

# Sanitizers concern every object of the build, so they are set for the whole tree and not
# handed on to consumers of the installed library.
if(BELFRY_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=address,undefined)
elseif(BELFRY_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  # g++ says of each fence that ThreadSanitizer does not see it; what stands on one says so there.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  add_link_options(-fsanitize=thread)
elseif(NOT BELFRY_SANITIZE STREQUAL "")
  message(FATAL_ERROR "BELFRY_SANITIZE is '${BELFRY_SANITIZE}'; give 'address', 'thread' or nothing")
endif()

if(BELFRY_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "BELFRY_FUZZ is ON and the compiler is ${CMAKE_CXX_COMPILER_ID}; libFuzzer "
                        "comes with clang: use --preset asan, or CMAKE_CXX_COMPILER=clang++-14")
  endif()
endif()

# belfry_compile_options(target): warnings, and what the whole build asks of each of its objects.
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

# belfry_optimise(target): for builds with a sanitizer, where only what the tests run most is
# optimised: the code of a sanitizer's checks is long, and optimising all of it takes minutes.
function(belfry_optimise target)
  if(NOT BELFRY_SANITIZE STREQUAL "")
    target_compile_options(${target} PRIVATE -O1)
  endif()
  if(BELFRY_FUZZ)
    # The library's own branches guide the fuzzer; each program links the driver itself.
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# belfry_test_options(target): what every program and library of tests/ has in common. Tests call
# the device API in very many places: there its calls are functions and little is optimised, or
# compiling would take longer than running. The library under test is built as it is for users.
function(belfry_test_options target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${target} PRIVATE belfry fmt::fmt)
  belfry_compile_options(${target})
  if(BELFRY_SANITIZE STREQUAL "")
    target_compile_definitions(${target} PRIVATE BELFRY_OUTLINE_CALLS)
    target_compile_options(${target} PRIVATE -O1 -g0)
  endif()
endfunction()

# belfry_test(name [SLOW] [SERIAL] [SEEDED] [NO_ASAN] [NO_TSAN] [TIMEOUT seconds] [SECONDS seconds]
#             sources...)
# A GoogleTest program that may include the private headers of src/. One CTest entry a program.
#   SLOW     labelled `slow`, so that a quick run can leave it out (ctest -LE slow)
#   SERIAL   runs alone: it measures time, or needs every core
#   SEEDED   labelled `seeded`: `./dev soak` runs it again and again with BELFRY_FIRST_SEED and
#            BELFRY_SEEDS (how many) in its environment
#   NO_ASAN, NO_TSAN   not built with that sanitizer: it has nothing to find there
#   TIMEOUT  300 where it is not given
#   SECONDS  how long it runs, about, so that CTest starts the long ones first
function(belfry_test name)
  cmake_parse_arguments(arg "SLOW;SERIAL;SEEDED;NO_ASAN;NO_TSAN" "TIMEOUT;SECONDS" "" ${ARGN})
  if((arg_NO_TSAN AND BELFRY_SANITIZE STREQUAL "thread")
      OR (arg_NO_ASAN AND BELFRY_SANITIZE STREQUAL "address"))
    return()
  endif()
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE GTest::gtest GTest::gtest_main nlohmann_json::nlohmann_json)
  target_precompile_headers(${name} REUSE_FROM belfry_test_pch)
  belfry_test_options(${name})
  set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
  add_test(NAME ${name} COMMAND ${name})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  set(labels "")
  foreach(flag SLOW SEEDED)
    if(arg_${flag})
      string(TOLOWER ${flag} label)
      list(APPEND labels ${label})
    endif()
  endforeach()
  if(NOT arg_SECONDS)
    set(arg_SECONDS 0)
  endif()
  set_tests_properties(${name} PROPERTIES
    TIMEOUT ${arg_TIMEOUT} COST ${arg_SECONDS} LABELS "${labels}")
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
