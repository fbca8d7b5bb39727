// Package tcp runs collectives over sockets, among ranks on any machines. It needs nothing but
// a network.
//
// # Connections
//
// Each pair of ranks of a group has one connection. Both ends prove the job's token before anything
// else travels (rendezvous.World.Listen). That keeps unauthenticated clients out; anyone on the
// wire can read and change what travels. With World.TLS it is encrypted: a link is then one end of
// a pair of sockets, and two goroutines carry what passes it to and from the TLS connection
// (tunnel.go). A byte that was changed on the way ends the group, with an error that says so.
//
// # Calls
//
// In each call every rank sends every other one the header of the call, and behind it, without
// any framing, the data that the other rank needs: how much that is follows from the header.
// So a call that two ranks have begun differently is found before its data is used, and a call
// has finished when every rank has begun it.
//
// Small reductions are one-shot: ranks send their operands to each other, and every rank adds them
// up. In larger ones each rank owns a chunk, gets the operands of that chunk directly from their
// owners, adds them in the call's association, and sends the result on, segment by segment and
// while the next segments arrive: as many bytes as a ring, in two steps instead of 2(P-1). All
// ranks have bitwise identical results, those of package host.
//
// # Waiting
//
// A call runs on the goroutine that started it, or on that of its queue. It polls its sockets
// without blocking for a while, unless there are more ranks than cores, and then sleeps in
// poll(2). The life of the group (which ranks are lost or closed, what ended it) is on a
// group.Board, which is looked at while a call waits.
package tcp
