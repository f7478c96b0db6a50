# Lets Horovod 0.28.1, which asks CMake for C++14, compile against torch >= 2.1, whose headers need C++17 (C++20 from 2.14 on):
# DSFRAME_CXX_STANDARD says which. DSFRAME_HOROVOD_CPU=1 compiles for CPUs, also against a torch with CUDA.
# Handed over by the environment (CMAKE_TOOLCHAIN_FILE; CMake >= 3.21 reads it), because Horovod's setup.py passes no options on.
# CMake reads a toolchain file before project(), when no compiler is known and what we set here would be overwritten: so the
# first reading only asks for a second one right after project(), and the second one redefines what "C++14" means.
set(CMAKE_POLICY_VERSION_MINIMUM 3.5) # Horovod's copy of gloo asks for CMake 2.8.12, which CMake 4 refuses
if(NOT CMAKE_CXX_COMPILER_LOADED)
  set(CMAKE_PROJECT_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")
else()
  # Without -g: 137 s of processor time instead of 159, and a wheel of 1 MB instead of 18 (two cores, Gloo only).
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")
  # Horovod's copy of gloo uses uint8_t without <cstdint>, which other headers include no longer from gcc 13 on.
  set(CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS} -include cstdint")
  set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++$ENV{DSFRAME_CXX_STANDARD}")
  set(CMAKE_CXX14_EXTENSION_COMPILE_OPTION "-std=gnu++$ENV{DSFRAME_CXX_STANDARD}")
  if("$ENV{DSFRAME_HOROVOD_CPU}")
    # Horovod's own FindPytorch asks for the CUDA toolkit as soon as torch was built with CUDA and there is an nvcc or a
    # /usr/local/cuda. This one comes before it on CMAKE_MODULE_PATH and names torch's CPU libraries.
    file(WRITE "${CMAKE_BINARY_DIR}/cpu/FindPytorch.cmake" [=[
      execute_process(COMMAND ${PY_EXE} -c "import torch; from pathlib import Path; top = Path(torch.__file__).parent; libraries = [str(top / 'lib' / f'lib{name}.so') for name in ('c10', 'torch', 'torch_cpu', 'torch_python')]; print(torch.__version__, top, ';'.join(libraries), sep='\\n')"
                      OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
      string(REGEX MATCH "^([^\n]*)\n([^\n]*)\n([^\n]*)$" described "${described}")
      set(Pytorch_VERSION "${CMAKE_MATCH_1}")
      set(Pytorch_INCLUDE_DIRS "${CMAKE_MATCH_2}/include" "${CMAKE_MATCH_2}/include/torch/csrc/api/include")
      set(Pytorch_LIBRARY_DIRS "${CMAKE_MATCH_2}/lib")
      set(Pytorch_LIBRARIES "${CMAKE_MATCH_3}")
      set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=1")
      set(Pytorch_CXX11 TRUE)
      set(Pytorch_CUDA FALSE)
      set(Pytorch_ROCM FALSE)
      set(PYTORCH_FOUND TRUE)
      set(Pytorch_FOUND TRUE)
    ]=])
    list(PREPEND CMAKE_MODULE_PATH "${CMAKE_BINARY_DIR}/cpu")
  endif()
endif()
