// Package env is the one place that says which environment variables Euryale reads, what they
// mean, and how their values are read.
//
// A variable is a constant, such as [Timeout]. Its type is the kind of its values, and reads them:
// Timeout.Read(os.Getenv). [All] lists the variables with what users are told of them: euryale
// doctor, the documentation and the check for misspelt names go by it. A value that cannot be read
// is an error of one form: the variable, its value, and what to use instead.
//
// An empty variable counts as not set.
package env
