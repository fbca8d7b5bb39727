// Package reference holds the plainest Communicator there is: ranks are
// goroutines, a call is a meeting under a mutex, and nothing is fast.
//
// It exists for tests: of the suite in package backendtest, of wrappers, and of
// anything that takes a Communicator and does not care which. Read it to learn
// what a Communicator must do; read package host to learn how it is done well.
package reference
