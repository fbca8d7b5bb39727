package env

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"io"
)

// MetricsCredential returns what a client must show to read the metrics of a job that was started
// with these variables, "" if they are for everybody: EURYALE_CREDENTIAL, or else a text from which
// the token, which lets one join the job, cannot be computed. A launcher that gives ranks a token
// of their own sets the former from the variables that its user has set.
func MetricsCredential(getenv func(string) string) string {
	credential, token := Credential.Read(getenv), Token.Read(getenv)
	if credential != "" || token == "" {
		return credential
	}
	h := hmac.New(sha256.New, []byte(token))
	io.WriteString(h, "euryale metrics")
	return hex.EncodeToString(h.Sum(nil))
}
