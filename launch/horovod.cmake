# Lets Horovod 0.28.1, which asks CMake for C++14, compile against torch >= 2.1, whose headers need C++17 (C++20 from 2.14 on):
# DSFRAME_CXX_STANDARD says which.
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
endif()
