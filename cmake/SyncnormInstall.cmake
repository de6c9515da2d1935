# The installed package: one export set per component, so that find_package reads only what is asked for.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_directory "${CMAKE_INSTALL_DATADIR}/cmake/syncnorm")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
foreach(component IN ITEMS syncnorm ${SYNCNORM_COMPONENTS})
  install(TARGETS syncnorm_${component} EXPORT syncnorm-${component}-targets
    INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
  install(EXPORT syncnorm-${component}-targets NAMESPACE syncnorm:: DESTINATION "${package_directory}")
endforeach()

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/syncnorm-config.cmake.in"
  "${PROJECT_BINARY_DIR}/syncnorm-config.cmake"
  INSTALL_DESTINATION "${package_directory}" NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/syncnorm-config-version.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES
  "${PROJECT_BINARY_DIR}/syncnorm-config.cmake"
  "${PROJECT_BINARY_DIR}/syncnorm-config-version.cmake"
  "${CMAKE_CURRENT_LIST_DIR}/syncnorm-backends.cmake"
  DESTINATION "${package_directory}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DATADIR}/doc/syncnorm")
