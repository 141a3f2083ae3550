// Package tests holds the tests that cross packages. Those behind the build tag `gotorch` hold the core against torch itself.
package tests
