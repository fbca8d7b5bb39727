package bucket_test

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/bucket"
	"github.com/euryale-ml/euryale/internal/files"
	"github.com/euryale-ml/euryale/internal/testing/objectstore"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// logins is a server of tokens, as Google's: of accounts, of federations and of the machine. What
// it gives names what it was asked with.
func logins(t *testing.T) *httptest.Server {
	var busy atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.ParseForm()
		token := map[string]any{"token_type": "Bearer", "expires_in": 3600,
			"issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}
		switch {
		case r.URL.Path == "/busy" && busy.Add(1) < 3:
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		case strings.HasPrefix(r.URL.Path, "/computeMetadata/v1/instance/service-accounts/") &&
			r.Header.Get("Metadata-Flavor") == "Google":
			token["access_token"] = "machine"
		case r.Form.Get("assertion") != "":
			token["access_token"] = "service"
		case r.Form.Get("refresh_token") == "good":
			token["access_token"] = "user"
		case r.Form.Get("subject_token") == "of a pod":
			token["access_token"] = "pod"
		default:
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusBadRequest)
			token = map[string]any{"error": "invalid_grant", "error_description": "it is revoked"}
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(token)
	}))
	t.Cleanup(s.Close)
	return s
}

// TestAccountsOfGoogleLogIn: by each way for which its tools have variables or files.
func TestAccountsOfGoogleLogIn(t *testing.T) {
	s, at := objectstore.Start(t), logins(t)
	key := require.Value(rsa.GenerateKey(rand.Reader, 2048))(t)
	pkcs := require.Value(x509.MarshalPKCS8PrivateKey(key))(t)
	secret := string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs}))
	pod := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(pod, []byte("of a pod"), 0o600))
	user := map[string]any{"type": "authorized_user", "client_id": "id", "client_secret": "s",
		"refresh_token": "good", "token_uri": at.URL}
	with := func(name string, value any) map[string]any {
		all := map[string]any{}
		for k, v := range user {
			all[k] = v
		}
		all[name] = value
		return all
	}
	for name, c := range map[string]struct {
		file any // of GOOGLE_APPLICATION_CREDENTIALS
		env  map[string]string
		want string // what requests say, or the error
	}{
		"service account": {file: map[string]any{"type": "service_account", "client_email": "a@b",
			"private_key": secret, "private_key_id": "1", "token_uri": at.URL},
			want: "Bearer service"},
		"authorized user": {file: user, want: "Bearer user"},
		"workload identity": {file: map[string]any{"type": "external_account", "audience": "a",
			"subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": at.URL,
			"credential_source": map[string]any{"file": pod}}, want: "Bearer pod"},
		"metadata server": {env: map[string]string{
			"GCE_METADATA_HOST": strings.TrimPrefix(at.URL, "http://")}, want: "Bearer machine"},
		"HMAC key": {env: map[string]string{"GS_ACCESS_KEY_ID": "GOOG1",
			"GS_SECRET_ACCESS_KEY": "s"}, want: "GOOG4-HMAC-SHA256 Credential=GOOG1/"},
		"half an HMAC key": {env: map[string]string{"GS_ACCESS_KEY_ID": "GOOG1"},
			want: "error: only one is set"},
		"revoked":      {file: with("refresh_token", "bad"), want: "error: it is revoked"},
		"unknown type": {file: with("type", "api_key"), want: "error: unknown credential type"},
		"busy server":  {file: with("token_uri", at.URL+"/busy"), want: "Bearer user"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("HOME", t.TempDir())
			t.Setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", s.Address+"/storage/v1/")
			for _, unset := range []string{"GOOGLE_APPLICATION_CREDENTIALS", "GS_ACCESS_KEY_ID",
				"GS_SECRET_ACCESS_KEY", "STORAGE_EMULATOR_HOST", "GCE_METADATA_HOST"} {
				t.Setenv(unset, "")
			}
			if c.file != nil {
				path := filepath.Join(t.TempDir(), "login.json")
				text := require.Value(json.Marshal(c.file))(t)
				require.NoError(t, os.WriteFile(path, text, 0o600))
				t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
			}
			for name, value := range c.env {
				t.Setenv(name, value)
			}
			var said, wrong []string
			s.Instead(func(_ int64, w http.ResponseWriter, r *http.Request, h http.HandlerFunc) {
				said = append(said, r.Header.Get("Authorization"))
				for name := range r.Header {
					if strings.HasPrefix(name, "X-Amz-") {
						wrong = append(wrong, name)
					}
				}
				h(w, r)
			})
			if says, fails := strings.CutPrefix(c.want, "error: "); fails {
				require.Fails(t, name, require.Err(bucket.Open("gs://bucket/run")), says,
					"GOOGLE_APPLICATION_CREDENTIALS")
				return
			}
			in := require.Value(files.At("gs://bucket/"+strings.ReplaceAll(name, " ", "-"),
				bucket.Open))(t)
			require.NoError(t, in.Create("f", files.Text([]byte("x"))))
			require.Equal(t, "the file", string(require.Value(in.Read("f", 9))(t)), "x")
			for _, s := range said {
				require.Check(t, strings.HasPrefix(s, c.want), "it says %q", s)
			}
			require.Check(t, len(said) > 1 && len(wrong) == 0, "%d requests, with %v", len(said),
				wrong)
		})
	}
}

// TestAmazonsVariablesDoNotLeadToGoogle, whose store would not hear that a file must not be there.
func TestAmazonsVariablesDoNotLeadToGoogle(t *testing.T) {
	t.Setenv("AWS_ENDPOINT_URL_S3", "")
	t.Setenv("AWS_ENDPOINT_URL", "https://storage.googleapis.com")
	require.Fails(t, "Open", require.Err(bucket.Open("s3://b/run")), backend.ErrArgument,
		"gs://b/run", "GS_ACCESS_KEY_ID")
}
