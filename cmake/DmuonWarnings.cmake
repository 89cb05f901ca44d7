# Warnings are errors in our code; torch's headers are SYSTEM.
function(dmuon_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Werror)
endfunction()

# Sanitizers, for every target: a program must be built with them when its library is.  A finding ends the program.
# vptr is off: it needs type information that torch's libraries do not export.
if(DMUON_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${DMUON_SANITIZE};-fno-sanitize=vptr;\
-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=${DMUON_SANITIZE})
endif()

# ccache, where it is installed.  The sloppiness is what ccache needs to reuse files that use a precompiled header.
find_program(DMUON_CCACHE ccache)
mark_as_advanced(DMUON_CCACHE)
if(DMUON_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${DMUON_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${DMUON_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()
