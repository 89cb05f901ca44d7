# The installed torch wheel as the target dmuon::torch.  The interpreter is asked where torch is: find_package(Torch)
# fails on CUDA wheels when there is no CUDA toolkit.  Shared by this build and, installed, by dmuonConfig.cmake.
#
# Sets DMUON_TORCH_VERSION, DMUON_TORCH_MINOR ("2.11") and DMUON_TORCH_ROOT, or DMUON_TORCH_PROBLEM with what to do.
set(DMUON_TORCH_PROBLEM "")
find_package(Python3 REQUIRED COMPONENTS Interpreter)
# Reads torch/version.py and does not import torch, which would take seconds at every configure.
execute_process(
  COMMAND ${Python3_EXECUTABLE} -c "import importlib.util, pathlib, runpy
root = pathlib.Path(importlib.util.find_spec('torch').origin).parent
print(runpy.run_path(str(root / 'version.py'))['__version__'], root.as_posix())"
  OUTPUT_VARIABLE DMUON_TORCH_QUERY OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE DMUON_TORCH_FAILED ERROR_QUIET)

if(DMUON_TORCH_FAILED OR NOT DMUON_TORCH_QUERY MATCHES "^(([0-9]+\\.[0-9]+)[^ ]*) (.*)$")
  set(DMUON_TORCH_PROBLEM "${Python3_EXECUTABLE} has no torch: install torch 2.11 to 2.15 there, or name another "
                          "interpreter with -DPython3_EXECUTABLE=... (pip needs --no-build-isolation)")
  string(CONCAT DMUON_TORCH_PROBLEM ${DMUON_TORCH_PROBLEM})
else()
  set(DMUON_TORCH_VERSION "${CMAKE_MATCH_1}")
  set(DMUON_TORCH_MINOR "${CMAKE_MATCH_2}")
  set(DMUON_TORCH_ROOT "${CMAKE_MATCH_3}")
endif()

if(NOT DMUON_TORCH_PROBLEM AND NOT TARGET dmuon::torch)
  add_library(dmuon::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(dmuon::torch SYSTEM INTERFACE
    "${DMUON_TORCH_ROOT}/include" "${DMUON_TORCH_ROOT}/include/torch/csrc/api/include")
  # Full paths: CMake then puts torch's lib folder into the RPATH of the build tree, and only there.
  # --no-as-needed: libtorch.so brings the CUDA backend although no symbol of it is used.
  target_link_libraries(dmuon::torch INTERFACE
    "${DMUON_TORCH_ROOT}/lib/libc10.so" "${DMUON_TORCH_ROOT}/lib/libtorch_cpu.so" "${DMUON_TORCH_ROOT}/lib/libtorch.so")
  target_link_options(dmuon::torch INTERFACE "LINKER:--no-as-needed")
  target_compile_definitions(dmuon::torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
endif()
