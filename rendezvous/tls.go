package rendezvous

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
)

// With TLS every connection is encrypted before the handshake that proves the token, and the proofs
// cover a secret of the connection that only its two ends can compute ("tls-exporter", RFC 9266).
// So somebody between two ranks, with a TLS connection to each, has no proof to show: the proofs
// that pass by are for other connections. Certificates prove nothing here. The server makes one for
// the occasion, and the client accepts any. If a key were derived from the token, every
// unauthenticated client who connects could test guesses of the token against a certificate; this
// way nothing that a server gives unauthenticated clients depends on the token.
//
// What a client gives does: it proves the token first, to whoever listens where it expects rank 0.
// Somebody who takes that address before rank 0 can test guesses against the proof, offline and as
// fast as they like; without TLS, so can anybody who only reads along. Guessing 128 random bits or
// more is hopeless, guessing a word is not.

// secured makes the connections of a rank's listener TLS 1.3 if the rank uses TLS. It closes the
// listener if it fails.
func secured(ln net.Listener, me identity) (net.Listener, error) {
	if !me.tls {
		return ln, nil
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key for TLS: %w", errors.Join(err, ln.Close()))
	}
	form := &x509.Certificate{SerialNumber: big.NewInt(1)}
	certificate, err := x509.CreateCertificate(rand.Reader, form, form, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make a certificate for TLS: %w", errors.Join(err, ln.Close()))
	}
	return tls.NewListener(ln, &tls.Config{
		MinVersion: tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{certificate},
			PrivateKey: key}},
		SessionTicketsDisabled: true, // a connection is made once
	}), nil
}

// overTLS makes the client's end of a connection TLS 1.3.
func overTLS(conn net.Conn) net.Conn {
	return tls.Client(conn, &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, // the proofs of the token verify the peer: see above
	})
}

// binding is the secret of a connection that proofs cover; nil without TLS. The TLS handshake must
// have finished.
func binding(conn net.Conn) ([]byte, error) {
	c, ok := conn.(*tls.Conn)
	if !ok {
		return nil, nil
	}
	state := c.ConnectionState()
	return state.ExportKeyingMaterial("EXPORTER-Channel-Binding", nil, 32)
}

// explainTLS adds advice to an error of the first words on a connection.
func explainTLS(conn net.Conn, err error) error {
	if c, ok := conn.(*tls.Conn); ok && !c.ConnectionState().HandshakeComplete {
		return fmt.Errorf("no TLS with the other side: set EURYALE_TLS=1 on all ranks, or on "+
			"none: %w", err)
	}
	return err
}
