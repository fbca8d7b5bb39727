// Package metrics serves what a rank does to Prometheus:
//
//	comm, err := euryale.Init(ctx)
//	server, err := metrics.Serve(comm) // where EURYALE_METRICS says; nowhere if it is not set
//	defer server.Close()
//
// Package fit tells of its steps; another loop does so by [observe.Watch]. A program's own metrics
// go to [Server.Registry]. docs/observing.md lists the metrics.
//
// It is a package of its own, which programs import, and not something that a variable switches on
// in all of them, because the client library adds 3 MB to a program.
//
// # Who can ask
//
// Each rank of a machine has its own port: EURYALE_METRICS=:9090 is 127.0.0.1:9090 for the first
// one, and 9091 for the next. An address before the colon lets other machines ask; where the job
// has an EURYALE_TOKEN, they then need the credential that is made of it ([observe.Credential]).
// The answers have neither the token nor the environment in them.
//
// One scrape runs at a time, at most 20 a second. Others wait for up to 3 s, and get status 503
// then. Connections, their headers and their time are limited. What goes wrong is the client's
// problem alone: the job goes on.
package metrics
