# Sets VSA_CUDA, VSA_CUDA_FACTS (how the kernels were built, or why not) and, with nvcc, the library vsa_cuda.
set(VSA_CUDA OFF)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # the flags below name them
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  set(VSA_CUDA_FACTS "no working nvcc was found when vsa_jax was built")
  message(STATUS "vsa_jax: no CUDA kernels: ${VSA_CUDA_FACTS}; everything else is built")
  return()
endif()
enable_language(CUDA)
# 12.5 is the first with cudaGetDriverEntryPointByVersion.
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.5)
  set(VSA_CUDA_FACTS "nvcc was ${CMAKE_CUDA_COMPILER_VERSION} when vsa_jax was built, 12.5 or newer is needed")
  message(STATUS "vsa_jax: no CUDA kernels: ${VSA_CUDA_FACTS}; everything else is built")
  return()
endif()

set(VSA_CUDA ON)
set(VSA_CUDA_FACTS "sm_90a, by nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
message(STATUS "vsa_jax: CUDA kernels: ${VSA_CUDA_FACTS}")
find_package(CUDAToolkit REQUIRED)
file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS sm90/*.cu sm90/*.cc)
add_library(vsa_cuda STATIC dispatch.cc ${cuda_sources})
target_link_libraries(vsa_cuda PRIVATE vsa_headers PUBLIC CUDA::cudart_static)
target_compile_options(vsa_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
  -O3 -std=c++17 --expt-relaxed-constexpr -lineinfo -gencode=arch=compute_90a,code=sm_90a>)
set_target_properties(vsa_cuda PROPERTIES
  CUDA_RUNTIME_LIBRARY Static
  CUDA_COMPILER_LAUNCHER "/bin/sh;${CMAKE_CURRENT_SOURCE_DIR}/strict_nvcc.sh")
