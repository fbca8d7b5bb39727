package bucket

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/s3utils"
	"golang.org/x/oauth2"
	"golang.org/x/oauth2/google"
)

// googleAddress is where Cloud Storage answers.
const googleAddress = "https://storage.googleapis.com"

// google sets the options for the interface that Cloud Storage shares with S3, where tokens or
// Google's own signatures take the place of Amazon's.
func (d *dir) google(o *minio.Options) (string, error) {
	d.hint = "set GOOGLE_APPLICATION_CREDENTIALS to the key of an account that may do so, run " +
		"gcloud auth application-default login, or set GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY"
	o.Creds = credentials.NewStatic("", "", "", credentials.SignatureAnonymous)
	o.Region = "auto"
	emulator := os.Getenv("STORAGE_EMULATOR_HOST")
	if emulator != "" && !strings.Contains(emulator, "://") {
		emulator = "http://" + emulator
	}
	at := address(o, cmp.Or(emulator, os.Getenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"),
		googleAddress))
	at, _, _ = strings.Cut(at, "/") // of another interface
	transport, err := minio.DefaultTransport(o.Secure)
	if err != nil {
		return "", err
	}
	var base http.RoundTripper = transport
	if emulator == "" {
		if base, err = authorized(base); err != nil {
			return "", fmt.Errorf("%w: %s", err, d.hint)
		}
	}
	o.Transport = conditions{base}
	return at, nil
}

// authorized has requests prove who sends them.
func authorized(base http.RoundTripper) (http.RoundTripper, error) {
	key := signature{id: os.Getenv("GS_ACCESS_KEY_ID"), secret: os.Getenv("GS_SECRET_ACCESS_KEY"),
		base: base, words: googles}
	switch {
	case key.id != "" && key.secret != "":
		return key, nil
	case key.id != key.secret:
		return nil, errors.New("of GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY only one is set")
	}
	const scope = "https://www.googleapis.com/auth/devstorage.read_write"
	ctx := context.WithValue(context.Background(), oauth2.HTTPClient,
		&http.Client{Timeout: time.Minute})
	tokens, err := google.DefaultTokenSource(ctx, scope)
	if err != nil {
		return nil, err
	}
	// What is refused now will be in each try. Of what does not answer, requests try again.
	refused := (*oauth2.RetrieveError)(nil)
	if _, err := tokens.Token(); errors.As(err, &refused) &&
		refused.Response.StatusCode < http.StatusInternalServerError {
		return nil, err
	}
	return &oauth2.Transport{Source: tokens, Base: base}, nil
}

// conditions says in Google's words that an object must not exist.
type conditions struct{ base http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (c conditions) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Header.Get(ifNoneMatch) == "*" {
		r = r.Clone(r.Context())
		r.Header.Del(ifNoneMatch)
		r.Header.Set("X-Goog-If-Generation-Match", "0")
	}
	return c.base.RoundTrip(r)
}

const ifNoneMatch = "If-None-Match"

// signature signs requests with an HMAC key, as Google's V4 signatures do: Amazon's in other words.
// With Google's conditional headers it refuses Amazon's.
type signature struct {
	id, secret string
	base       http.RoundTripper
	words      words
}

// words are what differs between the two.
type words struct{ algorithm, key, service, header string }

var googles = words{"GOOG4-HMAC-SHA256", "GOOG4", "storage", "X-Goog-"}

// RoundTrip implements http.RoundTripper.
func (s signature) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	s.sign(r, time.Now().UTC())
	return s.base.RoundTrip(r)
}

// sign signs the host, and the headers that count. The body is not signed: TLS protects it.
func (s signature) sign(r *http.Request, now time.Time) {
	const region, body = "auto", "UNSIGNED-PAYLOAD"
	moment := now.Format("20060102T150405Z")
	scope := strings.Join([]string{moment[:8], region, s.words.service,
		strings.ToLower(s.words.key) + "_request"}, "/")
	r.Header.Set(s.words.header+"Date", moment)
	r.Header.Set(s.words.header+"Content-Sha256", body)
	signed := map[string]string{"host": cmp.Or(r.Host, r.URL.Host)}
	for name, values := range r.Header {
		if strings.HasPrefix(name, s.words.header) {
			signed[strings.ToLower(name)] = strings.Join(values, ",")
		}
	}
	names := slices.Sorted(maps.Keys(signed))
	request := []string{r.Method, s3utils.EncodePath(r.URL.Path),
		strings.ReplaceAll(r.URL.Query().Encode(), "+", "%20")}
	for _, name := range names {
		request = append(request, name+":"+strings.TrimSpace(signed[name]))
	}
	request = append(request, "", strings.Join(names, ";"), body)
	hash := sha256.Sum256([]byte(strings.Join(request, "\n")))
	key := []byte(s.words.key + s.secret)
	for _, part := range strings.Split(scope, "/") {
		key = keyed(key, part)
	}
	text := strings.Join([]string{s.words.algorithm, moment, scope, hex.EncodeToString(hash[:])},
		"\n")
	r.Header.Set("Authorization", fmt.Sprintf("%s Credential=%s/%s, SignedHeaders=%s, Signature=%x",
		s.words.algorithm, s.id, scope, strings.Join(names, ";"), keyed(key, text)))
}

func keyed(key []byte, text string) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(text))
	return h.Sum(nil)
}
