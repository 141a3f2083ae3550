// Package api is what gopy binds: free functions over int64, float64, string and bool. Handles are positive int64. Tensors cross as the
// address of a DLManagedTensor: one that is passed in belongs to the core from the call on, also when the call fails; one that is returned
// belongs to the caller.
//
// Every function refuses to run in a forked child, turns a panic into an error, and at its end runs the tensor deleters that are queued (see
// package dlpack). The text of every error is "CODE|message", CODE being the Python class that it becomes.
package api
