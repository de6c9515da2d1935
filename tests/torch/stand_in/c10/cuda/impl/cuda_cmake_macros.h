#pragma once

// libtorch's build generates this header where it has CUDA; Debian's has not.
