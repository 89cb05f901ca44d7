# Libraries that only the tests and benchmarks need.  Says what to install instead of a bare "not found".
macro(dmuon_require_tool package used_for debian)
  find_package(${package} QUIET)
  if(NOT ${package}_FOUND)
    message(FATAL_ERROR "${package} was not found; ${used_for} need it.  On Debian or Ubuntu: "
                        "apt-get install ${debian}.  Elsewhere: install it and set CMAKE_PREFIX_PATH.")
  endif()
endmacro()

if(DMUON_TESTS)
  dmuon_require_tool(GTest "the C++ tests" libgtest-dev)
endif()
if(DMUON_BENCH)
  dmuon_require_tool(benchmark "the C++ benchmarks" libbenchmark-dev)
endif()
