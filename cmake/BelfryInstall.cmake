# cmake --install, and the package that find_package(belfry CONFIG) finds afterwards.
include(CMakePackageConfigHelpers)

set(BELFRY_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/belfry)

install(TARGETS belfry EXPORT belfryTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/belfry DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.hpp")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(EXPORT belfryTargets NAMESPACE belfry:: DESTINATION ${BELFRY_PACKAGE_DIR})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/belfryConfig.cmake.in
  ${PROJECT_BINARY_DIR}/belfryConfig.cmake INSTALL_DESTINATION ${BELFRY_PACKAGE_DIR})
# Before 1.0 a minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/belfryConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/belfryConfig.cmake ${PROJECT_BINARY_DIR}/belfryConfigVersion.cmake
  DESTINATION ${BELFRY_PACKAGE_DIR})
