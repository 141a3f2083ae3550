// Package gotorch turns a bridge tensor into a gotorch tensor and back without a copy, so that a pass can be written with gotorch's operators. Both
// are an at::Tensor*.
//
// # Caveats
//
// It exists under the build tag `gotorch` only, and is not in the default wheel: gotorch's C++ part ties a binary to one torch version, its
// tensors are freed by finalizers, and its init changes torch's thread count unless OMP_NUM_THREADS is set. `make oracle` builds and
// tests it against the torch that is installed.
package gotorch
