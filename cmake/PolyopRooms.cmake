# How the source tree becomes targets. A file that is added to a room is picked up by the next build: no list to edit.

# polyop_room_sources(<variable> <room> [EXCLUDE <regex>...])
# All C++ sources below polyop/<room>, as absolute paths; paths that match one of the expressions are left out.
function(polyop_room_sources variable room)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "EXCLUDE")
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/polyop/${room}/*.cpp")
  foreach(expression IN LISTS arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "${expression}")
  endforeach()
  set(${variable} "${sources}" PARENT_SCOPE)
endfunction()

# polyop_compile_options(<target>): the flags that every target of this project is compiled with.
function(polyop_compile_options target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  # Contraction would let the compiler fuse a*b+c in one loop and not in its tail: the same row would get other bits in
  # another batch. Kernels ask for a fused multiply-add by name.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>")
  # nvcc's front end warns of template lambdas (445) and of nodiscard results that are assigned (2810): false alarms.
  target_compile_options(${target} PRIVATE
                         "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-diag-suppress=445,2810>")
  if(POLYOP_WARNINGS)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic>")
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # Two false alarms of GCC in its own headers: "text" + std::string (bug 105651) and std::sort of fewer than 16
      # elements (bug 104165).
      target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-array-bounds>")
    endif()
  endif()
  if(POLYOP_WERROR)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
  endif()
endfunction()

# polyop_add_test_room(<folder>)
# One executable from all sources of a folder below tests/cpp: tests/cpp/ops/attention -> test_ops_attention.
function(polyop_add_test_room folder)
  file(GLOB sources CONFIGURE_DEPENDS "${folder}/*.cpp")
  file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}/tests/cpp" "${folder}")
  string(REPLACE "/" "_" name "test_${name}")
  add_executable(${name} ${sources})
  # Highway's foreach_target.h includes a test of SIMD code by its own name, once for each target.
  target_include_directories(${name} PRIVATE "${folder}")
  target_compile_definitions(${name} PRIVATE "POLYOP_SOURCE_DIR=\"${PROJECT_SOURCE_DIR}\"")
  polyop_compile_options(${name})
  target_link_libraries(${name} PRIVATE polyop Threads::Threads GTest::gtest GTest::gtest_main)
  if(TARGET polyop_testing)
    target_link_libraries(${name} PRIVATE polyop_testing)
  endif()
  if(TARGET hwy::hwy)
    target_link_libraries(${name} PRIVATE hwy::hwy)
  endif()
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 120 PROPERTIES TIMEOUT 900)
endfunction()
