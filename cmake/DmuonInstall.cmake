# What is installed.
#   C++ (cmake --install): headers, libraries and find_package(dmuon).
#   wheel (scikit-build-core sets SKBUILD): the libraries and build_info.json, all in dmuon/lib/.
# The libraries find each other through $ORIGIN; torch's folder is in the RPATH of the build tree only.
set(DMUON_LIBRARIES dmuon)
if(DMUON_HAVE_KERNELS)
  list(APPEND DMUON_LIBRARIES dmuon_kernels)
endif()
set_target_properties(${DMUON_LIBRARIES} PROPERTIES BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN")

# The Python package reads this before it loads the library, and refuses another torch minor.
set(DMUON_BUILD_INFO "$<TARGET_FILE_DIR:dmuon>/build_info.json")
file(GENERATE OUTPUT "${DMUON_BUILD_INFO}" CONTENT "{\"torch\": \"${DMUON_TORCH_VERSION}\", \
\"dmuon\": \"${PROJECT_VERSION}\", \"kernels\": $<IF:$<BOOL:${DMUON_HAVE_KERNELS}>,true,false>}\n")

if(SKBUILD)
  install(TARGETS ${DMUON_LIBRARIES} LIBRARY DESTINATION dmuon/lib)
  install(FILES "${DMUON_BUILD_INFO}" DESTINATION dmuon/lib)
  return()
endif()

include(CMakePackageConfigHelpers)
set(DMUON_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/dmuon")
configure_package_config_file(cmake/dmuonConfig.cmake.in "${CMAKE_CURRENT_BINARY_DIR}/dmuonConfig.cmake"
                              INSTALL_DESTINATION "${DMUON_CMAKE_DIR}")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/dmuonConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(TARGETS ${DMUON_LIBRARIES} EXPORT dmuonTargets LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(EXPORT dmuonTargets NAMESPACE dmuon:: DESTINATION "${DMUON_CMAKE_DIR}")
install(DIRECTORY include/dmuon DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/dmuonConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/dmuonConfigVersion.cmake"
              cmake/DmuonTorch.cmake DESTINATION "${DMUON_CMAKE_DIR}")
install(FILES "${DMUON_BUILD_INFO}" DESTINATION "${CMAKE_INSTALL_LIBDIR}/dmuon")
