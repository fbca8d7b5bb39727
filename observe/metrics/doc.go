// Package metrics serves what a rank does to Prometheus:
//
//	comm, err := euryale.Init(ctx)
//	server, err := metrics.Serve(comm) // where EURYALE_METRICS says; nowhere if it is not set
//	defer server.Close()
//
// Package fit tells of its steps; another loop does so by [observe.Watch]. A program's own metrics
// go to [Server.Registry]. docs/observing.md lists the metrics.
//
// It is a separate package, which programs import, and not something that a variable switches on in
// all of them, because the client library adds 3 MB to a program.
//
// docs/observing.md says who can ask, how often, and with which credential. The answers have
// neither the token nor the environment in them. What goes wrong is the client's problem alone: the
// job goes on.
package metrics
