//go:build !linux

package session

import "net"

// acked reports whether a machine has acknowledged all that a connection sent to it, which only
// Linux tells: here it is enough that there is a connection.
func acked(*net.TCPConn) bool { return true }
