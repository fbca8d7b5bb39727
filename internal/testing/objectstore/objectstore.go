// Package objectstore is an object store on this machine, with the interface of S3 (gofakes3),
// whose requests tests count, and answer in its place.
package objectstore

import (
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// URL is of the bucket that is there.
const URL = "s3://bucket"

// Store is a store. It has what is in it in memory.
type Store struct {
	Requests atomic.Int64 // since the last Instead
	Sent     atomic.Int64 // bytes of answers
	Address  string       // by Start
	instead  atomic.Pointer[Answer]
	serve    http.Handler
}

// Answer answers a request, by its number from 1 on. serve answers it as the store does.
type Answer func(number int64, w http.ResponseWriter, r *http.Request, serve http.HandlerFunc)

// New returns an empty store.
func New() (*Store, error) {
	in := s3mem.New()
	return &Store{serve: gofakes3.New(in).Server()}, in.CreateBucket("bucket")
}

// Start starts a store that is closed when the test ends. Until then the variables of this process
// name its address and a key.
func Start(t testing.TB) *Store {
	t.Helper()
	s := require.Value(New())(t)
	at := httptest.NewServer(s)
	t.Cleanup(at.Close)
	s.Address = at.URL
	for name, value := range Variables(at.URL) {
		t.Setenv(name, value)
	}
	return s
}

// Variables are what a client of the store at an address needs.
func Variables(address string) map[string]string {
	return map[string]string{"AWS_ENDPOINT_URL": address, "AWS_ENDPOINT_URL_S3": "",
		"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
		"AWS_SESSION_TOKEN": ""}
}

// Instead lets a function answer from now on, nil for none.
func (s *Store) Instead(answer Answer) {
	s.instead.Store(&answer)
	s.Requests.Store(0)
}

// ServeHTTP implements http.Handler.
func (s *Store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	number := s.Requests.Add(1)
	serve := func(w http.ResponseWriter, r *http.Request) {
		s.serve.ServeHTTP(counted{w, &s.Sent}, r)
	}
	if instead := s.instead.Load(); instead != nil && *instead != nil {
		(*instead)(number, w, r, serve)
	} else {
		serve(w, r)
	}
}

// Nobody returns a writer of an answer that nobody gets.
func Nobody() http.ResponseWriter { return httptest.NewRecorder() }

// counted counts what is sent.
type counted struct {
	http.ResponseWriter
	n *atomic.Int64
}

// Write implements io.Writer.
func (c counted) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p)
	c.n.Add(int64(n))
	return n, err
}
