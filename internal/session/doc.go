// Package session composes what euryale.Init and euryale.Run return. The ranks tell each other what
// they have (info.go), choose a backend (choose.go) and wrap it, on several machines in
// hierarchical calls (topology.go). The [Session] is outermost: it owns the world, the groups of
// Split (parts.go), the flight recorder with its trace file (trace.go), and what a launcher is told
// (report.go).
package session
