"""What the optional inductor backend uses of PyTorch although it is not public API.

Takes: PyTorch. Gives: names as in `koila._torch`, apart from it because importing inductor takes seconds.
"""

import torch._dynamo.exc
import torch._inductor.cpp_builder
import torch._inductor.exc

BackendCompilerFailed = torch._dynamo.exc.BackendCompilerFailed
"""What a failed compilation raises at the first run. Look at: torch/_dynamo/exc.py."""
get_cpp_compiler = torch._inductor.cpp_builder.get_cpp_compiler
"""The C++ compiler, or an error if there is none. Look at: torch/_inductor/cpp_builder.py."""
InvalidCxxCompiler = torch._inductor.exc.InvalidCxxCompiler
"""The error of `get_cpp_compiler`. Look at: torch/_inductor/exc.py."""
