#!/bin/sh
# Makes the certificates of the tests again, for a hundred years: an authority, a server's and a client's certificate that
# it signed, the server's key also encrypted, and a certificate of somebody else. Nothing outside the tests trusts them.
set -eu
cd "$(dirname "$0")"
make() { # name, subject, extensions
  openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
  openssl req -new -key "$1.key" -subj "/CN=$2" -out "$1.csr"
  printf '%s\n' "$3" > "$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 36500 -extfile "$1.ext" -out "$1.pem"
}
openssl ecparam -name prime256v1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -days 36500 -subj "/CN=Pegboard test authority" -out ca.pem \
  -addext keyUsage=critical,keyCertSign,cRLSign
make server localhost "subjectAltName=DNS:localhost,IP:127.0.0.1"
make client "a client" "extendedKeyUsage=clientAuth"
openssl ecparam -name prime256v1 -genkey -noout -out stranger.key
openssl req -x509 -new -key stranger.key -days 36500 -subj "/CN=a stranger" -out stranger.pem
openssl pkcs8 -topk8 -in server.key -out encrypted.key -passout pass:open-sesame
printf 'open-sesame\n' > password
rm -f ./*.csr ./*.ext ./*.srl ca.key
