# The layers of include/syncnorm as a table: for each folder, which folders of the library its headers may include, and
# as a regular expression which headers of others beside the standard library's. `.` is include/syncnorm itself.

set(syncnorm_layers . core comm adapters host cuda ops torch)

set(syncnorm_layer_core_includes core)
set(syncnorm_layer_core_others "^cuda_(fp16|bf16|runtime_api)\\.h$")
set(syncnorm_layer_comm_includes core comm)
set(syncnorm_layer_adapters_includes core comm adapters)
set(syncnorm_layer_adapters_others "^(mpi\\.h|nccl\\.h|cuda_runtime_api\\.h|(gloo|ATen|c10|torch)/.*|(sys|net|netinet|arpa)/[a-z_]+\\.h|(unistd|netdb|pthread|sched)\\.h)$")
set(syncnorm_layer_host_includes core host)
set(syncnorm_layer_host_others "^(omp|unistd|cpuid|sys/mman|[a-z]*mmintrin)\\.h$")
set(syncnorm_layer_cuda_includes core cuda)
set(syncnorm_layer_cuda_others "^cuda(_[a-z0-9_]+)?\\.h$")
# Of ops/, torch/ and of the umbrellas, what is of the CUDA side may include cuda/.
set(syncnorm_cuda_side "(\\.cuh$|^ops/(detail/)?cuda_|^torch/(detail/)?cuda)")
set(syncnorm_layer_ops_includes core comm host ops)
set(syncnorm_layer_ops_cuh_includes core comm cuda ops)
set(syncnorm_layer_ops_cuh_others "^cuda(_[a-z0-9_]+)?\\.h$")
set(syncnorm_layer_torch_includes core comm host ops torch)
set(syncnorm_layer_torch_others "^(ATen|c10|torch)/")
set(syncnorm_layer_torch_cuh_includes core comm host cuda ops torch)
set(syncnorm_layer_torch_cuh_others "^((ATen|c10|torch)/|cuda(_[a-z0-9_]+)?\\.h$)")
# The umbrella headers: what a plain C++20 compiler needs, and what a CUDA compiler does.
set(syncnorm_layer_._includes core comm host ops)
set(syncnorm_layer_._cuh_includes core comm cuda ops)

# What the standard library's headers are called.
set(syncnorm_standard_header "^[a-z_]+[0-9]*$")

# Headers that need a backend or OpenMP, as a regular expression of their path; all others need C++20 alone, and those
# named .cuh a CUDA compiler.
set(syncnorm_header_openmp "^host/openmp")
set(syncnorm_header_gloo "^adapters/(detail/)?gloo")
set(syncnorm_header_mpi "^adapters/(detail/)?mpi")
set(syncnorm_header_torch "^(adapters/(detail/)?c10d|torch/)")
# Of those, what also needs libtorch's CUDA side; tests/torch compiles it over a stand-in for that.
set(syncnorm_header_torch_cuda "^torch/(detail/)?cuda")
set(syncnorm_header_cuda "^(cuda/|core/detail/cuda_check|ops/(detail/)?cuda_|adapters/(detail/)?(staged|cuda))")
set(syncnorm_header_nccl "^adapters/(detail/)?nccl")
